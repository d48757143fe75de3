# SPDX-License-Identifier: Apache-2.0
"""The Conductor: global scheduling by reuse, transfer, queue, compute, SLO."""

# SPDX-License-Identifier: Apache-2.0
"""The papers' experiments, simulated: one module each."""

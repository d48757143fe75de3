# SPDX-License-Identifier: Apache-2.0
"""TTFT, TBT, hit rates, effective requests and goodput from records."""

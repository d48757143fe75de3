# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store: the Master knows where blocks are, clients move them."""

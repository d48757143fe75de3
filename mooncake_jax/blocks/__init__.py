# SPDX-License-Identifier: Apache-2.0
"""Blocks of KVCache: their keys, their bytes, who holds them. No arrays."""

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, a file each; `table` has them all by name."""

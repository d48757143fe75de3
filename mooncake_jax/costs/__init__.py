# SPDX-License-Identifier: Apache-2.0
"""Seconds from tokens and bytes: what the Conductor believes."""

# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode instances as state machines that touch no device."""

# SPDX-License-Identifier: Apache-2.0
"""Traces, generated workloads and chats, as rows and as requests."""

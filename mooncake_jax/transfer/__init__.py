# SPDX-License-Identifier: Apache-2.0
"""Bytes: segments of pinned host memory, device pages, links between them.

Read `heads.py` (a block as arrays), `segment.py`, `links.py`, then `book.py`
(which transfer waits for which).
"""

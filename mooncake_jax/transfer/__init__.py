# SPDX-License-Identifier: Apache-2.0
"""Bytes: registered memories and what moves between them.

Read `heads.py` (a block as arrays), `segment.py` and `links.py` (pinned host
memory), `far.py`, `entry.py` and `ssd.py` (media outside the process), then
`book.py` (which transfer waits for which) and `engine.py` (the calls).
"""

# SPDX-License-Identifier: Apache-2.0
"""The arithmetic: pure functions on pytrees of parameters and KVCache.

Read `params.py` (what is declared), `forward.py` (a stage of layers), then
`prefill.py` and `decode.py` (the two steps an instance runs).
"""

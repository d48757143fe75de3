# SPDX-License-Identifier: Apache-2.0
"""Mooncake's KVCache-centric disaggregated LLM serving, in JAX.

Read in this order: `serve.py` (the life of a request), `cluster.py` (its
states), `conductor/policies/` (the decision), `backend.py` (the only
place where time passes), `model/forward.py` (the arithmetic).
"""

__version__ = '0.1.0'

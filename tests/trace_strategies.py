# SPDX-License-Identifier: Apache-2.0
"""Traces as hypothesis draws them."""

from hypothesis import strategies as st

from mooncake_jax.workload.trace import TraceRow


@st.composite
def traces_of(draw, tokens_per_hash_id: int, max_rows: int = 8):
  """Rows whose ids form a prefix tree, lengths complete or not."""
  child: dict[tuple[int, int], int] = {}
  rows = []
  for i in range(draw(st.integers(1, max_rows))):
    branches = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    ids: list[int] = []
    for branch in branches:
      parent = ids[-1] if ids else -1
      ids.append(child.setdefault((parent, branch), len(child)))
    tail = draw(st.integers(1, tokens_per_hash_id))
    length = (len(ids) - 1) * tokens_per_hash_id + tail
    rows.append(TraceRow(i * 0.5, length, 1 + i, tuple(ids)))
  return rows

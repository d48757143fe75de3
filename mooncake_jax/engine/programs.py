# SPDX-License-Identifier: Apache-2.0
"""Everything that is compiled for serving."""

from typing import Any

from mooncake_jax.model.decode import decode_step
from mooncake_jax.model.pages import gather_pages
from mooncake_jax.model.pages import scatter_pages
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.transfer.heads import join_heads

PROGRAMS: tuple[Any, ...] = (
  prefill_chunk,
  decode_step,
  gather_pages,
  scatter_pages,
  join_heads,
)


def count() -> int:
  """Programs compiled so far, one a shape and place."""
  return sum(program._cache_size() for program in PROGRAMS)

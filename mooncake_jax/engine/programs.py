# SPDX-License-Identifier: Apache-2.0
"""Everything that is compiled for serving."""

from typing import Any

from mooncake_jax.model.decode import decode_step
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.transfer.heads import join_heads
from mooncake_jax.transfer.page_copies import copy_in
from mooncake_jax.transfer.page_copies import copy_out

PROGRAMS: tuple[Any, ...] = (
  prefill_chunk,
  decode_step,
  copy_out,
  copy_in,
  join_heads,
)


def count() -> int:
  """Programs compiled so far, one a shape and place."""
  return sum(program._cache_size() for program in PROGRAMS)

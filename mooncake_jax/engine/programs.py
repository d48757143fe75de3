# SPDX-License-Identifier: Apache-2.0
"""Everything that is compiled for serving."""

from collections.abc import Callable
from functools import partial
from typing import Any
from typing import NamedTuple

from mooncake_jax.model.decode import decode_step
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.pages import gather_pages
from mooncake_jax.model.pages import scatter_pages
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.model.tick import enter
from mooncake_jax.model.tick import leave
from mooncake_jax.model.tick import tick
from mooncake_jax.transfer.heads import join_heads


class PrefillPrograms(NamedTuple):
  """What computes chunks; others of the same signatures may stand in.

  Attributes:
    prefill: layers of a chunk on one stage.
    tick: all stages, and `leave`: the token after one.
  """

  prefill: Callable[..., Any] = prefill_chunk
  tick: Callable[..., Any] = tick
  leave: Callable[..., Any] = leave

  def with_attention(self, kernel: AttentionKernel) -> 'PrefillPrograms':
    """The same programs with another attention kernel than the portable."""
    if kernel in ('jnp', 'cpu'):  # the same for chunks
      return self
    return self._replace(
      prefill=partial(self.prefill, kernel=kernel),
      tick=partial(self.tick, kernel=kernel),
    )


OURS = PrefillPrograms()

PROGRAMS: tuple[Any, ...] = (
  prefill_chunk,
  enter,
  tick,
  leave,
  decode_step,
  gather_pages,
  scatter_pages,
  join_heads,
)


def count() -> int:
  """Programs compiled so far, one a shape and place."""
  return sum(program._cache_size() for program in PROGRAMS)

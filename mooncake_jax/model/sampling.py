# SPDX-License-Identifier: Apache-2.0
"""Draws the next token: greedy, temperature, min-p, top-k, top-p.

B batch, V vocab. A draw depends on the row's logits, seed and the position
of the token drawn, and on nothing else: not on the batch, not on when.
"""

from collections.abc import Sequence

import flax.struct
import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.request import Sampling


@flax.struct.dataclass
class SamplingRows:
  """`Sampling` of each row of a batch, as arrays.

  Attributes:
    temperature_B: float32; 0 is greedy.
    top_k_B: int32; 0 is all.
    top_p_B: float32 in (0, 1].
    min_p_B: float32 in [0, 1].
    seed_B: int32.
    logprobs_B: bool, whether its tokens' log probabilities are asked for.
  """

  temperature_B: jax.Array | np.ndarray
  top_k_B: jax.Array | np.ndarray
  top_p_B: jax.Array | np.ndarray
  min_p_B: jax.Array | np.ndarray
  seed_B: jax.Array | np.ndarray
  logprobs_B: jax.Array | np.ndarray

  @classmethod
  def of(cls, rows: Sequence[Sampling]) -> 'SamplingRows':
    """Returns host arrays of the rows; seeds modulo 2**32."""
    seeds = np.array([row.seed % 2**32 for row in rows], np.uint32)
    return cls(
      temperature_B=np.array([row.temperature for row in rows], np.float32),
      top_k_B=np.array([row.top_k for row in rows], np.int32),
      top_p_B=np.array([row.top_p for row in rows], np.float32),
      min_p_B=np.array([row.min_p for row in rows], np.float32),
      seed_B=seeds.view(np.int32),
      logprobs_B=np.array([row.logprobs is not None for row in rows]),
    )


def sample(
  logits_BV: jax.Array, rows: SamplingRows, position_B: jax.Array
) -> jax.Array:
  """Returns int32 [B], the tokens that will stand at `position_B`.

  Rows at temperature 0 take the most likely token. A batch of such rows
  draws nothing, and one without top-k and top-p sorts nothing.
  """
  greedy_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  is_drawn_B = rows.temperature_B > 0

  def draw(logits_BV):
    scale_B = 1 / jnp.where(is_drawn_B, rows.temperature_B, 1)
    scaled_BV = logits_BV * scale_B[:, None]
    scaled_BV = _drop_unlikely(scaled_BV, rows)
    is_cut_B = is_drawn_B & ((rows.top_k_B > 0) | (rows.top_p_B < 1))
    kept_BV = jax.lax.cond(
      jnp.any(is_cut_B), lambda a: _cut(a, rows), lambda a: a, scaled_BV
    )
    noise_BV = _gumbel(rows.seed_B, position_B, logits_BV.shape[-1])
    drawn_B = jnp.argmax(kept_BV + noise_BV, axis=-1).astype(jnp.int32)
    return jnp.where(is_drawn_B, drawn_B, greedy_B)

  return jax.lax.cond(jnp.any(is_drawn_B), draw, lambda _: greedy_B, logits_BV)


def _drop_unlikely(logits_BV, rows):
  """Masks what is less than min-p times as likely as the likeliest."""
  highest_B = jnp.max(logits_BV, axis=-1)
  lowest_B = highest_B + jnp.log(rows.min_p_B)  # min_p of 0 drops nothing
  return jnp.where(logits_BV >= lowest_B[:, None], logits_BV, -jnp.inf)


def _gumbel(seed_B, position_B, vocab_size):
  """Noise by vocabulary entry, so that near-ties elsewhere don't matter."""

  def row(seed, position):
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)

  return jax.vmap(row)(seed_B, position_B)


def _cut(logits_BV, rows):
  """Masks what is outside the top k, then outside the top p of the rest.

  With probabilities .5 .3 .1 .1 and p = .7, .5 and .3 stay: an entry stays
  while the mass before it is below p. Entries equal to the last one stay.
  """
  V = logits_BV.shape[-1]
  sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
  rank_1V = jnp.arange(V)[None]
  k_B1 = jnp.where(rows.top_k_B > 0, rows.top_k_B, V)[:, None]
  sorted_BV = jnp.where(rank_1V < k_B1, sorted_BV, -jnp.inf)
  mass_BV = jax.nn.softmax(sorted_BV, axis=-1)
  before_BV = jnp.cumsum(mass_BV, axis=-1) - mass_BV
  p_B1 = rows.top_p_B[:, None]
  stays_BV = ((before_BV < p_B1) | (p_B1 >= 1)) & (rank_1V < k_B1)
  lowest_B1 = jnp.min(
    jnp.where(stays_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True
  )
  return jnp.where(logits_BV >= lowest_B1, logits_BV, -jnp.inf)

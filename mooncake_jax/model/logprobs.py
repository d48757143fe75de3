# SPDX-License-Identifier: Apache-2.0
"""What a step tells of its tokens: one array, so that one copy brings it.

B batch, V vocab, E of the likeliest tokens, R = 2 + 2 E numbers of a report:
the token, its log probability, the likeliest tokens and theirs; floats as
their bits.
"""

import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.request import MAX_LOGPROBS
from mooncake_jax.request import TokenLogprobs


def report(
  logits_BV: jax.Array, tokens_B: jax.Array, is_asked_B: jax.Array
) -> jax.Array:
  """Returns int32 [B, R]; all but the tokens are 0 where no row asks.

  Log probabilities are the model's, before temperature and cuts.
  """
  E = min(MAX_LOGPROBS, logits_BV.shape[-1])

  def likely(logits_BV):
    logprobs_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32), axis=-1)
    own_B1 = jnp.take_along_axis(logprobs_BV, tokens_B[:, None], axis=1)
    top_BE, ids_BE = jax.lax.top_k(logprobs_BV, E)
    return jnp.concatenate([_bits(own_B1), ids_BE, _bits(top_BE)], axis=1)

  def nothing(logits_BV):
    return jnp.zeros((len(tokens_B), 1 + 2 * E), jnp.int32)

  rest = jax.lax.cond(jnp.any(is_asked_B), likely, nothing, logits_BV)
  return jnp.concatenate([tokens_B[:, None], rest], axis=1)


def tokens(report_BR: np.ndarray) -> np.ndarray:
  """The tokens [B] of a report."""
  return report_BR[..., 0]


def of_row(report_R: np.ndarray, count: int) -> TokenLogprobs:
  """One row's, with so many of the likeliest tokens."""
  own, ids_E, top_E = np.split(report_R[1:], [1, 1 + len(report_R[2:]) // 2])
  logprobs = top_E.view(np.float32).tolist()
  top = tuple(zip(ids_E.tolist(), logprobs))[:count]
  return TokenLogprobs(float(own.view(np.float32)[0]), top)


def _bits(values):
  return jax.lax.bitcast_convert_type(values, jnp.int32)

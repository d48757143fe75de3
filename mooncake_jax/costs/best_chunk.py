# SPDX-License-Identifier: Apache-2.0
"""Where the best chunk size of a pipeline lies, in closed form.

`costs.pipeline.best_chunk_tokens` searches for it with any cost model. For a
polynomial, the makespan of n chunks on s even stages, whose times do not fall,
is

  T = (sum of t + (s - 1) * the largest t) / s

as all work passes a stage and the largest chunk passes the others alone. With
t(L, x) = c + b * x + a * (2 * L * x + x * x) and N tokens the sum is
c * n + b * N + a * N * N, and dT/dx = 0 gives

  fixed    n = N / x, largest t = c + (b + 2 * a * N) * x:
           x = sqrt(c * N / ((s - 1) * (b + 2 * a * N)))
  dynamic  n = (b * N + a * N * N) / (b * x), each t = c + b * x:
           x = sqrt(c * (b * N + a * N * N) / (s - 1)) / b

Left out: gamma, a * x * x within a chunk, and that n is a whole number.
"""

import math

from mooncake_jax.costs.chunks import Chunking
from mooncake_jax.costs.model import PolynomialCost


def ideal_chunk_tokens(
  costs: PolynomialCost,
  num_tokens: int,
  stages: int,
  chunking: Chunking = 'fixed',
) -> float:
  """Where dT/dx = 0, see above.

  The whole prompt for one stage, and where T has no least: chunks whose time
  does not grow with them.
  """
  c, b = costs.prefill_base_s, costs.prefill_s_per_token
  a = costs.prefill_s_per_token_squared
  if stages == 1:
    return float(num_tokens)
  # s a token: of the last chunk of fixed ones, of each of dynamic ones.
  slope = b + 2 * a * num_tokens if chunking == 'fixed' else b
  if not slope:
    return float(num_tokens)
  work_s = b * num_tokens + a * num_tokens**2
  if chunking == 'fixed':
    tokens = math.sqrt(c * num_tokens / ((stages - 1) * slope))
  else:
    tokens = math.sqrt(c * work_s / (stages - 1)) / slope
  return min(max(tokens, 1.0), float(num_tokens))

# SPDX-License-Identifier: Apache-2.0
"""A cost model that is wrong on purpose, to study what prediction is worth.

Bound as the belief it lets the Conductor mispredict, bound as the truth it
makes the work itself vary; what the other one is does not change. A belief
that is late, not wrong, is `conductor.telemetry`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
import math
from statistics import NormalDist

from mooncake_jax.costs.model import check_count
from mooncake_jax.costs.model import check_positive
from mooncake_jax.costs.model import Chunk
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import Link
from mooncake_jax.costs.model import LINKS

_NORMAL = NormalDist()
_PREFILL, _DECODE, _TRANSFER = range(3)
_MASK = 2**64 - 1


@dataclass(frozen=True)
class PerturbedCost(CostModel):
  """`costs` times a bias and a random factor, one for each term.

  The factors are log-normal with mean 1. The same question always gets the
  same answer, and what differs only in what is reused is off by one factor, so
  reuse still saves time: a prompt's factor is drawn for its length, a chunk's
  for where it ends, a step's for its number of rows (it stays linear in the
  context), a transfer's for its link and bytes. In a trace nearly every prompt
  has a length of its own, hence a factor of its own. A prompt is not the sum of
  its chunks here, but in the mean.

  Attributes:
    costs: what is perturbed.
    prefill_bias, decode_bias, transfer_bias: 1.2 takes 20 % longer.
    prefill_noise, decode_noise, transfer_noise: standard deviation of the
      factor's logarithm, 0 is none: 0.1 is about 10 %.
    seed: other seed, other factors.

  Raises:
    ValueError: a bias that is not above 0, a negative noise or seed.
  """

  costs: CostModel
  prefill_bias: float = 1.0
  decode_bias: float = 1.0
  transfer_bias: float = 1.0
  prefill_noise: float = 0.0
  decode_noise: float = 0.0
  transfer_noise: float = 0.0
  seed: int = 0

  def __post_init__(self):
    for field in fields(self):
      if field.name.endswith(('_bias', '_noise')):
        name, value = field.name, getattr(self, field.name)
        check_positive(f'PerturbedCost.{name}', value, name.endswith('_noise'))
    check_count('PerturbedCost.seed', self.seed, 0)

  def prefill_s(self, chunk_tokens: int, prefix_tokens: int) -> float:
    factor = self._prefill_factor(prefix_tokens + chunk_tokens)
    return factor * self.costs.prefill_s(chunk_tokens, prefix_tokens)

  def prompt_s(
    self, num_tokens: int, prefix_tokens: int, chunk_tokens: int
  ) -> float:
    return self._prefill_factor(num_tokens) * self.costs.prompt_s(
      num_tokens, prefix_tokens, chunk_tokens
    )

  def pass_s(self, chunks: Sequence[Chunk]) -> float:
    """Each chunk weighs as much as it would take alone."""
    pass_s = self.costs.pass_s(chunks)
    alone_s = sum(self.costs.prefill_s(*chunk) for chunk in chunks)
    off_s = sum(self.prefill_s(*chunk) for chunk in chunks)
    return pass_s * off_s / alone_s if alone_s else pass_s

  def decode_step_s(self, batch_size: int, context_tokens: int) -> float:
    step_s = self.costs.decode_step_s(batch_size, context_tokens)
    return self._decode_factor(batch_size) * step_s

  def riding_s(self, batch_size: int, context_tokens: int) -> float:
    riding_s = self.costs.riding_s(batch_size, context_tokens)
    return self._decode_factor(batch_size) * riding_s

  def transfer_s(self, num_bytes: int, link: Link) -> float:
    factor = self.transfer_bias * self._draw(
      self.transfer_noise, _TRANSFER + LINKS.index(link), num_bytes
    )
    return factor * self.costs.transfer_s(num_bytes, link)

  def _prefill_factor(self, stop: int) -> float:
    return self.prefill_bias * self._draw(self.prefill_noise, _PREFILL, stop)

  def _decode_factor(self, batch_size: int) -> float:
    return self.decode_bias * self._draw(self.decode_noise, _DECODE, batch_size)

  def _draw(self, noise: float, term: int, what: int) -> float:
    if not noise:
      return 1.0
    word = _mix(_mix(_mix(self.seed) ^ term) ^ what)
    # Inside (0, 1), in both ends of which the normal is infinite.
    share = ((word >> 11) + 0.5) / 2**53
    return math.exp(noise * _NORMAL.inv_cdf(share) - noise * noise / 2)


def _mix(word: int) -> int:
  """SplitMix64: neighbours get words that have nothing in common."""
  word = (word + 0x9E3779B97F4A7C15) & _MASK
  word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
  word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
  return word ^ (word >> 31)

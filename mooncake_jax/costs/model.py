# SPDX-License-Identifier: Apache-2.0
"""The cost model: seconds of a chunk, a prompt, a decode step, a transfer.

One value of it is what the Conductor believes; a `sim.VirtualBackend` takes
another (or the same, for an oracle) as the truth.

A chunk of x tokens on L cached ones attends to L*x + x*x/2 pairs, so it takes

  t(L, x) = c + gamma * L + b * x + a * (2 * L * x + x * x)

and a decode step of B rows with S tokens of context in all

  t(B, S) = d0 + d1 * B + d2 * S.

As in FAST'25 section 4.1, which predicts prefill by a polynomial of length and
prefix length. Differs: gamma (reading the prefix) and c are kept apart so that
a prompt cut into chunks costs what its chunks cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
import math
from typing import get_args
from typing import Literal
from typing import NamedTuple
from typing import Protocol

# host segment -> own device; own device -> host segment; host segment -> that
# of another instance; prefill device -> decode device; an instance's memory
# <-> its SSD; an instance's memory <-> a store that no instance owns.
Link = Literal[
  'onload',
  'offload',
  'copy',
  'handoff',
  'ssd_read',
  'ssd_write',
  'remote_read',
  'remote_write',
]
LINKS: tuple[Link, ...] = get_args(Link)


class Chunk(NamedTuple):
  """So many tokens of a prompt, on as many of it as `prefix_tokens`."""

  tokens: int
  prefix_tokens: int


class CostModel(Protocol):
  """Seconds of work, each alone on its instance or link.

  Whoever inherits has to say what a chunk, a decode step and a transfer take;
  the other three follow from these where nothing better is known.
  """

  def prefill_s(self, chunk_tokens: int, prefix_tokens: int) -> float:
    """One chunk of `chunk_tokens` on `prefix_tokens` already in KVCache."""
    ...

  def decode_step_s(self, batch_size: int, context_tokens: int) -> float:
    """One token for each row; `context_tokens` is the sum over the rows."""
    ...

  def transfer_s(self, num_bytes: int, link: Link) -> float:
    """`num_bytes` over a link that nobody shares meanwhile."""
    ...

  def prompt_s(
    self, num_tokens: int, prefix_tokens: int, chunk_tokens: int
  ) -> float:
    """Prompt tokens [prefix_tokens, num_tokens) in chunks, one after another.

    The last chunk is the ragged one. Nothing left to compute takes 0 s.
    """
    assert chunk_tokens >= 1, f'{chunk_tokens=}'
    starts = range(prefix_tokens, num_tokens, chunk_tokens)
    return sum(
      self.prefill_s(min(chunk_tokens, num_tokens - start), start)
      for start in starts
    )

  def pass_s(self, chunks: Sequence[Chunk]) -> float:
    """One pass over chunks of several prompts.

    Here as over one chunk of as many tokens, to which each prefix adds what
    it adds to its own chunk.
    """
    together_s = self.prefill_s(sum(c.tokens for c in chunks), 0)
    return together_s + sum(
      self.prefill_s(*chunk) - self.prefill_s(chunk.tokens, 0)
      for chunk in chunks
    )

  def riding_s(self, batch_size: int, context_tokens: int) -> float:
    """What a decode batch adds to the pass over a chunk that it rides on.

    Its rows and contexts; the weights are read with the chunk.
    """
    if not batch_size:
      return 0.0
    alone_s = self.decode_step_s(batch_size, context_tokens)
    return max(alone_s - self.decode_step_s(0, 0), 0.0)


@dataclass(frozen=True, kw_only=True)
class Links(CostModel):
  """A line a link: a latency, then bytes at a bandwidth.

  Attributes:
    <link>_bytes_per_s, <link>_latency_s: see `Link`. Clusters without an SSD
      or a remote store never ask for those: their defaults are the order of
      one NVMe drive (7 and 4 GB/s, 0.1 ms) and of 100 Gbit/s (1 ms).
  """

  onload_bytes_per_s: float
  onload_latency_s: float = 0.0
  offload_bytes_per_s: float
  offload_latency_s: float = 0.0
  copy_bytes_per_s: float
  copy_latency_s: float = 0.0
  handoff_bytes_per_s: float
  handoff_latency_s: float = 0.0
  ssd_read_bytes_per_s: float = 7e9
  ssd_read_latency_s: float = 1e-4
  ssd_write_bytes_per_s: float = 4e9
  ssd_write_latency_s: float = 1e-4
  remote_read_bytes_per_s: float = 12.5e9
  remote_read_latency_s: float = 1e-3
  remote_write_bytes_per_s: float = 12.5e9
  remote_write_latency_s: float = 1e-3

  def transfer_s(self, num_bytes: int, link: Link) -> float:
    assert link in LINKS, f'{link=} is not one of {LINKS}'
    return getattr(self, f'{link}_latency_s') + num_bytes / getattr(
      self, f'{link}_bytes_per_s'
    )


@dataclass(frozen=True)
class PolynomialCost(Links):
  """The two polynomials and one line a link; `costs.fit` finds the numbers.

  Attributes:
    prefill_base_s: c, seconds a chunk costs whatever its size.
    prefill_s_per_prefix_token: gamma, for reading one token of prefix.
    prefill_s_per_token: b, for one token of the chunk.
    prefill_s_per_token_squared: a, for half a pair of tokens attending.
    decode_base_s: d0, seconds a step costs whatever its batch (weights).
    decode_s_per_row: d1, for one row of the batch.
    decode_s_per_context_token: d2, for one token of context of any row.
    The lines of `Links`.

  Raises:
    ValueError: a negative or infinite coefficient, a bandwidth of 0.
  """

  prefill_base_s: float
  prefill_s_per_prefix_token: float
  prefill_s_per_token: float
  prefill_s_per_token_squared: float
  decode_base_s: float
  decode_s_per_row: float
  decode_s_per_context_token: float

  def __post_init__(self):
    for field in fields(self):
      check_positive(
        f'PolynomialCost.{field.name}',
        getattr(self, field.name),
        zero=not field.name.endswith('_bytes_per_s'),
      )

  def prefill_s(self, chunk_tokens: int, prefix_tokens: int) -> float:
    pairs = (2 * prefix_tokens + chunk_tokens) * chunk_tokens
    return (
      self.prefill_base_s
      + self.prefill_s_per_prefix_token * prefix_tokens
      + self.prefill_s_per_token * chunk_tokens
      + self.prefill_s_per_token_squared * pairs
    )

  def pass_s(self, chunks: Sequence[Chunk]) -> float:
    """They share what a chunk costs whatever its size."""
    shared_s = (len(chunks) - 1) * self.prefill_base_s
    return sum(self.prefill_s(*chunk) for chunk in chunks) - shared_s

  def prompt_s(
    self, num_tokens: int, prefix_tokens: int, chunk_tokens: int
  ) -> float:
    """In closed form: the quadratic terms of the chunks telescope."""
    assert chunk_tokens >= 1, f'{chunk_tokens=}'
    new_tokens = num_tokens - prefix_tokens
    if new_tokens <= 0:
      return 0.0
    n = -(-new_tokens // chunk_tokens)
    # Chunk i starts on prefix + i * chunk tokens.
    read_tokens = n * prefix_tokens + chunk_tokens * n * (n - 1) // 2
    return (
      n * self.prefill_base_s
      + self.prefill_s_per_prefix_token * read_tokens
      + self.prefill_s_per_token * new_tokens
      + self.prefill_s_per_token_squared * (num_tokens**2 - prefix_tokens**2)
    )

  def decode_step_s(self, batch_size: int, context_tokens: int) -> float:
    return (
      self.decode_base_s
      + self.decode_s_per_row * batch_size
      + self.decode_s_per_context_token * context_tokens
    )


def check_positive(name: str, value: float, zero: bool = False) -> None:
  """Raises a ValueError unless value is finite and > 0 (or 0, with `zero`)."""
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if not number or not math.isfinite(value) or value < 0:
    raise ValueError(f'{name}={value!r} must be a finite number >= 0')
  if value == 0 and not zero:
    raise ValueError(f'{name}={value!r} must be > 0')


def check_count(name: str, value: int, least: int = 1) -> None:
  """Raises a ValueError unless value is a whole number >= `least`."""
  if type(value) is not int or value < least:
    raise ValueError(f'{name}={value!r} must be an integer >= {least}')

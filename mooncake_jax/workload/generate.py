# SPDX-License-Identifier: Apache-2.0
"""Generated traces with the published workloads' statistics.

The same seed gives the same rows. Sessions are drawn from a shape, laid out
whole in a window of time as long as the shape's native rate needs, merged in
order, and given Poisson arrivals at the rate asked for: order and reuse
distance follow the sessions, arrivals follow the rate. As FAST'25 section 5.1
did for its synthetic workload. Differs: the published conversation trace is
a window of a running service, so its first turns may lie before it; here
every session is whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
import math

import numpy as np

from mooncake_jax.costs.model import check_count
from mooncake_jax.costs.model import check_positive
from mooncake_jax.workload.shapes import CONVERSATION
from mooncake_jax.workload.shapes import SessionKind
from mooncake_jax.workload.shapes import SYNTHETIC
from mooncake_jax.workload.shapes import TOOL_AGENT
from mooncake_jax.workload.shapes import WorkloadShape
from mooncake_jax.workload.trace import TOKENS_PER_HASH_ID
from mooncake_jax.workload.trace import TraceRow

# A block before it has its hash id: a shared prefix's name and index, or the
# session, the turn that wrote it and its index.
_Block = tuple[str | int, int, int]


@dataclass(frozen=True)
class _Turn:
  """One request; `blocks` are its started blocks."""

  offset_s: float
  input_tokens: int
  output_tokens: int
  blocks: tuple[_Block, ...]


def conversation(
  num_requests: int,
  seed: int = 0,
  requests_per_s: float | None = None,
  tick_s: float = 0.0,
) -> list[TraceRow]:
  """Chats after one system prompt (block 0 is in all of them); 3.4 req/s.

  `tick_s=3.0` gathers arrivals as the published trace does.
  """
  return generate(CONVERSATION, num_requests, seed, requests_per_s, tick_s)


def tool_agent(
  num_requests: int, seed: int = 0, requests_per_s: float | None = None
) -> list[TraceRow]:
  """Half calls with one of two long fixed prefixes, half chats; 6.6 req/s."""
  return generate(TOOL_AGENT, num_requests, seed, requests_per_s)


def synthetic(
  num_requests: int, seed: int = 0, requests_per_s: float | None = None
) -> list[TraceRow]:
  """Long documents asked several questions, and short chats; 3.91 req/s."""
  return generate(SYNTHETIC, num_requests, seed, requests_per_s)


def distinct_prompts(
  num_tokens: int,
  count: int = 1,
  interval_s: float = 0.0,
  output_tokens: int = 1,
) -> list[TraceRow]:
  """Prompts of one length that share nothing, `interval_s` apart.

  Raises:
    ValueError: a count below 1, a negative interval.
  """
  for name, value in (
    ('num_tokens', num_tokens),
    ('count', count),
    ('output_tokens', output_tokens),
  ):
    check_count(f'distinct_prompts: {name}', value)
  check_positive('distinct_prompts: interval_s', interval_s, zero=True)
  blocks = math.ceil(num_tokens / TOKENS_PER_HASH_ID)
  return [
    TraceRow(
      i * interval_s,
      num_tokens,
      output_tokens,
      tuple(range(i * blocks, (i + 1) * blocks)),
    )
    for i in range(count)
  ]


def generate(
  shape: WorkloadShape,
  num_requests: int,
  seed: int = 0,
  requests_per_s: float | None = None,
  tick_s: float = 0.0,
) -> list[TraceRow]:
  """`num_requests` rows of a shape, sorted, timestamps in whole ms.

  Args:
    requests_per_s: mean of the Poisson arrivals; None is the native rate.
    tick_s: round arrivals down to multiples of this; 0 leaves them.

  Raises:
    ValueError: num_requests below 1, a rate not above 0.
  """
  check_count('generate: num_requests', num_requests)
  rate = shape.requests_per_s if requests_per_s is None else requests_per_s
  check_positive('generate: requests_per_s', rate)
  check_positive('generate: tick_s', tick_s, zero=True)
  rng = np.random.Generator(np.random.PCG64(seed))
  turns = _merge(shape, num_requests, rng)
  return _rows(turns, _arrivals(num_requests, rate, tick_s, rng))


def _merge(
  shape: WorkloadShape, num_requests: int, rng: np.random.Generator
) -> list[_Turn]:
  """Turns of enough sessions, in the order they arrive."""
  # Sessions are drawn so that each kind has its share of the requests.
  weights = np.cumsum([kind.share / kind.mean_turns for kind in shape.kinds])
  window_s = num_requests / shape.requests_per_s
  timed: list[tuple[float, _Turn]] = []
  session = 0
  while len(timed) < num_requests:
    pick = int(np.searchsorted(weights, rng.random() * weights[-1], 'right'))
    kind = shape.kinds[min(pick, len(shape.kinds) - 1)]
    limit = shape.max_prompt_tokens
    turns = list(_session(kind, session, limit, rng))
    turns = turns[: num_requests - len(timed)]
    if turns:  # else its first prompt was too long
      timed.extend(_lay_out(turns, window_s, rng))
    session += 1
  timed.sort(key=lambda item: item[0])
  return [turn for _, turn in timed]


def _lay_out(
  turns: list[_Turn], window_s: float, rng: np.random.Generator
) -> Iterator[tuple[float, _Turn]]:
  """Puts a whole session into the window, squeezed if it is longer."""
  length_s = turns[-1].offset_s
  squeeze = min(1.0, 0.9 * window_s / length_s) if length_s else 1.0
  start_s = rng.random() * (window_s - length_s * squeeze)
  for turn in turns:
    yield start_s + turn.offset_s * squeeze, turn


def _session(
  kind: SessionKind, session: int, limit: int, rng: np.random.Generator
) -> Iterator[_Turn]:
  """The turns of one session, each prompt at most `limit` tokens."""
  size = TOKENS_PER_HASH_ID
  prefix = _prefix(kind)
  document = kind.first.at(rng.random())
  length = max(document, kept := len(prefix) * size)
  if kind.document:
    assert kind.user is not None
    length += kind.user.at(rng.random())
  blocks, offset_s, turn = prefix, 0.0, 0
  while length <= limit:
    output = kind.output.at(rng.random())
    blocks = blocks[: kept // size] + tuple(
      (session, turn, i) for i in range(kept // size, -(-length // size))
    )
    yield _Turn(offset_s, length, output, blocks)
    if rng.random() >= kind.continues_after(turn):
      return
    assert kind.user is not None and kind.gap_s is not None
    user = kind.user.at(rng.random())
    if kind.document:
      kept, length = document, document + user
    elif rng.random() < kind.branches:
      assert kind.branch_blocks is not None and kind.branch_text is not None
      most = length // size
      kept = size * min(kind.branch_blocks.at(rng.random()), most)
      length = kept + kind.branch_text.at(rng.random())
      length = max(length, kind.first.at(0.0))
    else:
      kept, length = length, length + output + user
    offset_s += kind.gap_s.at(rng.random())
    turn += 1


def _prefix(kind: SessionKind) -> tuple[_Block, ...]:
  if not kind.prefix_blocks:
    return ()
  rest = ((kind.prefix, 0, i) for i in range(1, kind.prefix_blocks))
  return ('root', 0, 0), *rest


def _arrivals(
  num_requests: int, rate: float, tick_s: float, rng: np.random.Generator
) -> list[float]:
  """Poisson arrivals in whole milliseconds, as seconds."""
  gaps_s = [-math.log(1 - u) / rate for u in rng.random(num_requests)]
  times_s = np.cumsum(gaps_s) - gaps_s[0]
  if tick_s:
    times_s = np.floor(times_s / tick_s) * tick_s
  return [int(time * 1000) / 1000 for time in times_s]


def _rows(turns: list[_Turn], times_s: list[float]) -> list[TraceRow]:
  """Numbers blocks in the order they first appear, from 0."""
  ids: dict[_Block, int] = {}
  return [
    TraceRow(
      time_s,
      turn.input_tokens,
      turn.output_tokens,
      tuple(ids.setdefault(block, len(ids)) for block in turn.blocks),
    )
    for time_s, turn in zip(times_s, turns)
  ]

# SPDX-License-Identifier: Apache-2.0
"""Workloads composed of clients, as ServeGen (arXiv 2505.09999) models them.

A service's requests are those of many clients: a few send most of them, each
has its own lengths, and each arrives in bursts of its own. Sums of such
clients are bursty where a Poisson process of the same rate is not. The numbers
are parameters, not fits: its published client models are not needed to run.
"""

from dataclasses import dataclass
from itertools import count
from itertools import islice
import math

import numpy as np

from mooncake_jax.costs.model import check_count
from mooncake_jax.costs.model import check_positive
from mooncake_jax.workload.trace import TOKENS_PER_HASH_ID
from mooncake_jax.workload.trace import TraceRow


@dataclass(frozen=True)
class ClientMix:
  """What clients are like.

  Attributes:
    num_clients: that send requests.
    rate_skew: client k sends a share proportional to k ** -rate_skew; 0 is
      the same for all. With 1.2, the first 10 of 100 send two thirds.
    cv: coefficient of variation of the times between a client's requests
      (gamma distributed): 1 is Poisson, larger ones are bursts.
    swing, period_s: the rate goes as 1 + swing * sin(2 * pi * t / period_s),
      for all clients alike: a day, if one lasts so long.
    input_tokens, output_tokens: around which the clients' medians lie.
    spread: of the logarithm of a client's medians around these.
    within: of the logarithm of a client's lengths around its medians.
    prefix_blocks: blocks of 512 tokens that begin all prompts of a client.
    max_input_tokens, max_output_tokens: longer ones are cut.

  Raises:
    ValueError: a value out of its range.
  """

  num_clients: int = 100
  rate_skew: float = 1.2
  cv: float = 2.0
  swing: float = 0.0
  period_s: float = 86_400.0
  input_tokens: float = 1000.0
  output_tokens: float = 200.0
  spread: float = 0.8
  within: float = 0.6
  prefix_blocks: int = 0
  max_input_tokens: int = 100_000
  max_output_tokens: int = 4000

  def __post_init__(self):
    for name in ('num_clients', 'max_input_tokens', 'max_output_tokens'):
      check_count(f'ClientMix.{name}', getattr(self, name))
    for name in 'cv period_s input_tokens output_tokens'.split():
      check_positive(f'ClientMix.{name}', getattr(self, name))
    for name in 'rate_skew swing spread within'.split():
      check_positive(f'ClientMix.{name}', getattr(self, name), zero=True)
    check_count('ClientMix.prefix_blocks', self.prefix_blocks, 0)
    if self.swing >= 1:
      raise ValueError(f'ClientMix.swing={self.swing!r} must be below 1')
    if self.prefix_blocks * TOKENS_PER_HASH_ID >= self.max_input_tokens:
      raise ValueError(
        f'ClientMix.prefix_blocks={self.prefix_blocks} of '
        f'{TOKENS_PER_HASH_ID} tokens leave nothing of '
        f'max_input_tokens={self.max_input_tokens}'
      )


def client_mix(
  num_requests: int,
  requests_per_s: float,
  mix: ClientMix = ClientMix(),
  seed: int = 0,
) -> list[TraceRow]:
  """`num_requests` rows in order of arrival; the same seed gives the same.

  Args:
    requests_per_s: of all clients together, in the mean.

  Raises:
    ValueError: num_requests below 1, a rate not above 0.
  """
  check_count('client_mix: num_requests', num_requests)
  check_positive('client_mix: requests_per_s', requests_per_s)
  rng = np.random.Generator(np.random.PCG64(seed))
  shares = np.arange(1, mix.num_clients + 1) ** -mix.rate_skew
  rates = requests_per_s * shares / shares.sum()
  medians = rng.lognormal(0.0, mix.spread, (mix.num_clients, 2))
  times_s, clients = _arrivals(rates, num_requests, mix, rng)
  around = rng.lognormal(0.0, mix.within, (num_requests, 2))
  lengths = medians[clients] * around * (mix.input_tokens, mix.output_tokens)
  least = (mix.prefix_blocks * TOKENS_PER_HASH_ID + 1, 1)
  most = (mix.max_input_tokens, mix.max_output_tokens)
  inputs, outputs = np.clip(np.rint(lengths), least, most).astype(int).T
  ids = count(mix.num_clients * mix.prefix_blocks)
  return [
    TraceRow(
      int(time_s * 1000) / 1000,
      tokens,
      output_tokens,
      _hash_ids(client, tokens, mix.prefix_blocks, ids),
    )
    for time_s, client, tokens, output_tokens in zip(
      times_s.tolist(), clients.tolist(), inputs.tolist(), outputs.tolist()
    )
  ]


def _arrivals(
  rates: np.ndarray,
  num_requests: int,
  mix: ClientMix,
  rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
  """The first `num_requests` arrivals of all clients, and whose they are."""
  # Longer than needed by far: how many come in a time is random.
  window_s = 1.5 * num_requests / rates.sum() + 10 * mix.cv**2 / rates.max()
  times, clients = [], []
  for client, rate in enumerate(rates):
    expected = rate * window_s
    draws = math.ceil(expected + 10 * mix.cv * math.sqrt(expected) + 10)
    gaps_s = rng.gamma(mix.cv**-2, mix.cv**2 / rate, draws)
    # A client is found in the middle of things, not at the start of a gap.
    found = np.cumsum(gaps_s) - rng.random() * gaps_s[0]
    times.append(found[found < window_s])
    clients.append(np.full(len(times[-1]), client))
  all_times, all_clients = np.hstack(times), np.hstack(clients)
  order = np.argsort(all_times, kind='stable')[:num_requests]
  assert len(order) == num_requests, f'{len(order)} arrivals of {num_requests}'
  return _warped(all_times[order], mix), all_clients[order]


def _warped(times_s: np.ndarray, mix: ClientMix) -> np.ndarray:
  """Times at which a swinging rate has had as many arrivals as an even one."""
  if mix.swing:
    turn = 2 * math.pi / mix.period_s
    stop_s = 2 * times_s[-1] + mix.period_s
    even_s = np.linspace(0.0, stop_s, 1 + 64 * math.ceil(stop_s / mix.period_s))
    # The integral of 1 + swing * sin(turn * t).
    passed_s = even_s + mix.swing * (1 - np.cos(turn * even_s)) / turn
    times_s = np.interp(times_s, passed_s, even_s)
  return times_s - times_s[0]


def _hash_ids(
  client: int, tokens: int, prefix_blocks: int, ids: 'count[int]'
) -> tuple[int, ...]:
  first = client * prefix_blocks
  new = -(-tokens // TOKENS_PER_HASH_ID) - prefix_blocks
  return *range(first, first + prefix_blocks), *islice(ids, new)

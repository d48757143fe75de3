# SPDX-License-Identifier: Apache-2.0
"""What the server costs: a token, a first token, and under too much load.

The server is a process of its own, this one has the clients. Simulated, the
cluster's own time is nobody's processor time: what is left is the server's.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
import json
import random
import threading
import time

import numpy as np

from scripts.benches.http_load import Answer
from scripts.benches.http_load import at_a_rate
from scripts.benches.http_load import at_once
from scripts.benches.http_load import Process
from scripts.benches.http_load import prompt
from scripts.benches.http_load import server
from scripts.benches.rows import Row

SIM, ENGINE = 'configs/serve/sim_paper.gin', 'configs/serve/smollm2.gin'
STREAMS = 32
OVERLOAD = 4.0


@dataclass(frozen=True)
class Load:
  """More requests than a cluster can serve.

  Attributes:
    capacity_per_s: of such requests, about.
    ttft_s: what clients want; the server admits by a little less, as some
      of it goes by between them.
  """

  name: str
  config: str
  bindings: tuple[str, ...]
  model: str
  prompt_words: int
  output_tokens: int
  capacity_per_s: float
  ttft_s: float


# A prompt of 2,000 tokens takes an instance 0.24 s there.
SIMULATED = Load(
  'sim',
  SIM,
  (
    'ClusterSpec.prefill_instances=2',
    'ClusterSpec.decode_instances=2',
    'ClusterSpec.host_bytes=20_000_000_000',
    'SLO.ttft_s=2.8',
    "ConductorSpec.admission='early_rejection_predicted'",
  ),
  'sim',
  2000,
  20,
  8.4,
  3.0,
)
# About 300 tokens of prompt and 16 of output on SmolLM2 and two cores.
ON_ENGINE = Load(
  'engine',
  ENGINE,
  ('SLO.ttft_s=4.5',),
  'smollm2-135m',
  80,
  16,
  2.0,
  5.0,
)


def gateway(quick: bool) -> list[Row]:
  """Tokens, first tokens and overload; on the engine unless `quick`."""
  rows = [*streams(500 if quick else 1000)]
  rows += overload(SIMULATED, 10.0 if quick else 120.0)
  return rows if quick else rows + overload(ON_ENGINE, 120.0)


def streams(num_tokens: int) -> list[Row]:
  """32 streams, begun within a second, each due a token every 5 ms."""
  bindings = ['PolynomialCost.decode_base_s=0.003', 'SLO.tbt_s=1.0']
  rng = random.Random(0)
  bodies = [
    _body('sim', prompt(1000, rng), num_tokens, seed=i) for i in range(STREAMS)
  ]
  with server(SIM, bindings) as running:
    asyncio.run(at_once(running.port, bodies[:4]))  # warm
    busy_s, begun_s = running.cpu_s(), time.perf_counter()
    answers = asyncio.run(at_a_rate(running.port, bodies, STREAMS))
    busy_s = running.cpu_s() - busy_s
    took_s = time.perf_counter() - begun_s
    shares = [_overhead_share(running, answer) for answer in answers]
  tokens = STREAMS * num_tokens
  came = sum(len(answer.token_s) for answer in answers)
  # While all of them stream.
  start_s = max(answer.token_s[0] for answer in answers)
  stop_s = min(answer.token_s[-1] for answer in answers)
  meanwhile = sum(
    start_s < at_s <= stop_s for answer in answers for at_s in answer.token_s
  )
  return [
    Row(
      'gateway.tokens_per_s',
      meanwhile * tokens / came / (stop_s - start_s),
      'tokens/s',
      f'{STREAMS} streams, each due 200 a second, {came / tokens:.2f} chunks a '
      f'token, in {took_s:.1f} s',
      target=2000,
    ),
    Row(
      'gateway.cpu_per_token',
      1e3 * busy_s / tokens,
      'ms',
      'processor time of the whole server, prompts and simulation included',
      target=0.2,
      at_most=True,
    ),
    Row(
      'gateway.ttft_share',
      float(np.mean(shares)),
      'of TTFT',
      "what the client waited beside the cluster's part, mean",
      target=0.1,
      at_most=True,
    ),
  ]


def overload(load: Load, duration_s: float) -> list[Row]:
  """Four times what can be served, for so long."""
  rng = random.Random(1)
  count = round(OVERLOAD * load.capacity_per_s * duration_s)
  bodies = [
    _body(load.model, prompt(load.prompt_words, rng), load.output_tokens, i)
    for i in range(count)
  ]
  with server(load.config, load.bindings) as running:
    sizes = Sizes(running)
    answers = asyncio.run(
      at_a_rate(running.port, bodies, OVERLOAD * load.capacity_per_s)
    )
    grown = sizes.end()
  return [*overload_rows(load, answers, grown)]


def overload_rows(
  load: Load, answers: list[Answer], grown: float
) -> Iterator[Row]:
  """What became of all requests; `grown` is the server's memory's growth."""
  accepted = [answer for answer in answers if answer.status == 200]
  refused_s = [answer.took_s for answer in answers if answer.status == 429]
  kept = sum(answer.ttft_s <= load.ttft_s for answer in accepted)
  name = f'gateway.overload_{load.name}'
  others = len(answers) - len(accepted) - len(refused_s)
  yield Row(
    f'{name}_kept',
    kept / max(len(accepted), 1),
    'of accepted',
    f'within {load.ttft_s:g} s; {len(accepted)} accepted, {len(refused_s)} '
    f'refused, {others} others',
    target=0.9,
  )
  yield Row(
    f'{name}_429_p99',
    1e3 * float(np.percentile(refused_s, 99)) if refused_s else None,
    'ms',
    'from asking to the last byte',
    target=50 if load is SIMULATED else None,
    at_most=True,
  )
  yield Row(
    f'{name}_rss',
    grown,
    'growth',
    "of the server's memory after the first third",
    target=0.05,
    at_most=True,
  )


class Sizes:
  """Looks at a process's memory twice a second."""

  def __init__(self, running: Process):
    self._running = running
    self._found: list[int] = []
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._look)
    self._thread.start()

  def end(self) -> float:
    """How much more it has in the last third than in the second one."""
    self._over.set()
    self._thread.join()
    third = max(len(self._found) // 3, 1)
    second = self._found[third : 2 * third] or self._found
    return max(self._found[-third:]) / max(second) - 1

  def _look(self) -> None:
    while not self._over.wait(0.5):
      self._found.append(self._running.rss_bytes())


def _body(model: str, text: str, num_tokens: int, seed: int) -> dict:
  return {
    'model': model,
    'prompt': text,
    'max_tokens': num_tokens,
    'seed': seed,
    'ignore_eos': True,
  }


def _overhead_share(running: Process, answer: Answer) -> float:
  """Of a client's TTFT what the cluster had no part in."""
  path = f'/v1/conductor/explain/{answer.call_id}'
  (found,) = json.loads(running.get(path))['requests']
  cluster_s = found['first_token_s'] - found['decided_s']
  return 1 - cluster_s / answer.ttft_s

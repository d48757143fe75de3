# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode at once: what is left of what each promises alone.

A prefill and a decode instance of SmolLM2's shape serve prompts that all come
at once. Each chunk and each step, at the rows that it had, should take as long
as it takes alone: the sum of those over the seconds that serving took is the
share. Alone and served in turns, the best of each.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
import time

import jax
import numpy as np

from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DecodeRow
from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.costs.model import PolynomialCost
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.events import TokensEmitted
from mooncake_jax.model.params import init_params
from mooncake_jax.request import Request
from mooncake_jax.serve import Journal
from mooncake_jax.serve import serve
from mooncake_jax.slo import SLO
from scripts.benches.model import CONFIG
from scripts.benches.prefill_instance import prefill_chunks
from scripts.benches.rows import Row
from scripts.device import instance_specs
from scripts.measure import ended

PROMPT, OUTPUT, BATCH, STEPS = 512, 64, 8, 8
SPEC = ClusterSpec(
  prefill_instances=1,
  decode_instances=1,
  block_size_tokens=128,
  page_tokens=64,
  chunk_tokens=256,
  layers_per_transfer=10,
  max_tokens=PROMPT + OUTPUT,
  prefill_pool_tokens=4096,
  decode_pool_tokens=BATCH * (PROMPT + OUTPUT),
  max_batch=BATCH,
)
ROWS = (1, 2, 4, 6, 8)
# Nobody is refused and there is nowhere else to go: any costs will do.
COSTS = PolynomialCost(
  *(1e-3,) * 7,
  onload_bytes_per_s=1e9,
  offload_bytes_per_s=1e9,
  copy_bytes_per_s=1e9,
  handoff_bytes_per_s=1e9,
)
PROMISED = 0.9


def mixed(quick: bool) -> list[Row]:
  """The share on the clock, and by CPU-seconds, whatever neighbours do."""
  turns = 2 if quick else 4
  with _backend() as backend:
    alone: dict[str, list[np.ndarray]] = {'chunk': [], 'steps': []}
    served: list[tuple[np.ndarray, Counter[int]]] = []
    for turn in range(turns):
      alone['chunk'].append(_chunk_s(backend))
      alone['steps'].append(np.stack([_step_s(backend, n) for n in ROWS]))
      served.append(_served(backend, turn, BATCH + (4 if quick else 16)))
  best = {what: np.min(times, 0) for what, times in alone.items()}
  shares = [_promised(best, steps) / took for took, steps in served]
  wall, cpu = np.max(shares, 0)
  prompts = sum(steps.total() for _, steps in served) // turns
  what = 'seconds of all chunks and steps alone, of those they took together'
  prefill, steps = best['chunk'][0], best['steps'][-1][0]
  return [
    Row('mixed.prefill_alone', PROMPT / prefill, 'tokens/s', f'{PROMPT=}'),
    Row('mixed.decode_alone', BATCH / steps, 'tokens/s', f'{BATCH=}'),
    Row('mixed.steps', prompts, '', 'decode steps of a turn'),
    Row('mixed.share', float(wall), 'ratio', what, PROMISED),
    Row('mixed.cpu_share', float(cpu), 'ratio', 'the same by CPU-seconds'),
  ]


def _promised(
  best: Mapping[str, np.ndarray], steps: Counter[int]
) -> np.ndarray:
  """Seconds on the clock and of CPUs that all works take alone.

  Args:
    steps: how many there were by number of rows; 0 counts the prompts.
  """
  prefill = steps[0] * best['chunk']
  decode = [
    sum(n * np.interp(rows, ROWS, times) for rows, n in steps.items() if rows)
    for times in best['steps'].T
  ]
  return prefill + np.array(decode)


@contextmanager
def _backend() -> Iterator[DeviceBackend]:
  params = init_params(CONFIG, jax.random.key(0))
  layout, specs = SPEC.layout(CONFIG), instance_specs(SPEC, CONFIG)
  with DeviceBackend(CONFIG, layout, specs, params) as backend:
    warmup(backend)
    yield backend


def _clocks() -> np.ndarray:
  return np.array([time.perf_counter(), time.process_time()])


def _chunk_s(backend: DeviceBackend) -> np.ndarray:
  """Of one prompt's chunks, nothing else going on."""
  start_s = _clocks()
  prefill_chunks(backend, 0, PROMPT, SPEC.chunk_tokens)
  return _clocks() - start_s


def _step_s(backend: DeviceBackend, num_rows: int) -> np.ndarray:
  """Of one step halfway through the outputs."""
  pages = SPEC.layout(CONFIG).pages_for(PROMPT + OUTPUT)
  rows = tuple(
    DecodeRow(
      f'r{i}',
      0,
      1,
      PROMPT + OUTPUT // 2,
      tuple(range(1 + i * pages, 1 + (i + 1) * pages)),
      STEPS,
    )
    for i in range(num_rows)
  )
  start_s = _clocks()
  backend.decode('decode0', DecodeBatch(rows), STEPS)
  ended(backend)
  return (_clocks() - start_s) / STEPS


def _served(
  backend: DeviceBackend, turn: int, count: int
) -> tuple[np.ndarray, Counter[int]]:
  """Seconds for so many new prompts, and the steps that were made."""
  backend.restart_clock()
  draw = np.random.default_rng(turn)
  requests = []
  for i in range(count):
    prompt = draw.integers(0, CONFIG.vocab_size, PROMPT).astype(np.int32)
    keys = prefix_keys(prompt, SPEC.block_size_tokens)
    name = f'{turn}.{i}'
    requests.append(Request(name, 0.0, PROMPT, OUTPUT, keys, prompt))
  spec = ConductorSpec(admission='none')
  conductor = Conductor(spec, SPEC, CONFIG, COSTS, SLO())
  cluster = Cluster(SPEC, CONFIG, backend, costs=COSTS)
  start_s = _clocks()
  records, journal = serve(requests, conductor, cluster)
  took = _clocks() - start_s
  assert {record.outcome for record in records} == {'completed'}
  for segment in cluster.master.segments():
    cluster.lose_segment(segment)
  while not cluster.idle:
    cluster.step(None)
  return took, _steps(journal, count)


def _steps(journal: Journal, count: int) -> Counter[int]:
  """How many steps had how many rows; 0 is the prompts."""
  steps = Counter(
    len(event.emitted.tries)
    for event in journal
    if isinstance(event, TokensEmitted)
  )
  # Each prompt's first token is no step's.
  steps[1] -= count
  return steps + Counter({0: count})

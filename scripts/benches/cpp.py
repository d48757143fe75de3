# SPDX-License-Identifier: Apache-2.0
"""Chunked pipeline parallelism: overlap, real compute, memory."""

from collections.abc import Callable
from dataclasses import replace
import time
from typing import get_args

from mooncake_jax.blocks.accounting import kv_bytes
from mooncake_jax.cluster_spec import Executor
from mooncake_jax.costs.pipeline import even_makespan_s
from mooncake_jax.model_config import ModelConfig
from scripts.benches import fixed_stages
from scripts.benches.model import CONFIG
from scripts.benches.prefill_instance import prefill_backend
from scripts.benches.prefill_instance import prefill_chunks
from scripts.benches.rows import Row
from scripts.benches.turns import ours
from scripts.benches.turns import Times

EXECUTORS: tuple[Executor, ...] = get_args(Executor)
CHUNKS, STAGES, STAGE_S = 8, 4, 0.05
FIXED, FIXED_RUNS = 1.08, 3
PROMPT, CHUNK = 4096, 512
SPLITS = {'one': (), 'two': (15, 15)}
TWO_STAGES = 0.95
LONG, QUICK_LONG = 32_768, 8192
LIVE = 1.25
HOUR_S = 3600.0


def cpp(quick: bool) -> list[Row]:
  """All rows."""
  return [*fixed(), *two_stages(2 if quick else 5), *memory(quick)]


def fixed() -> list[Row]:
  """Stages that nap: what an executor adds to the ideal.

  SPMD steps all stages with one program, so what it adds a tick is added to
  every chunk and every stage.
  """
  ideal_s = even_makespan_s(CHUNKS, STAGES, STAGES * STAGE_S)
  name = f'cpp.fixed_{CHUNKS}x{STAGES}'
  rows = [Row(f'{name}.ideal_s', ideal_s, 's', '(n + s - 1) * t, by hand')]
  for executor in EXECUTORS:
    runs = [
      fixed_stages.measure(executor, CHUNKS, STAGES, STAGE_S)
      for _ in range(FIXED_RUNS)
    ]
    took_s = min(map(fixed_stages.makespan_s, runs))
    rows.append(
      Row(
        f'{name}.{executor}',
        took_s / ideal_s,
        'ratio',
        f'{took_s:.3f} s, best of {FIXED_RUNS}, of the ideal',
        target=FIXED if executor == 'mpmd' else None,
        at_most=True,
      )
    )
  return rows


def two_stages(turns: int) -> list[Row]:
  """The same prompt through one stage and through two, in turns.

  Simulated devices share the cores, so two stages can't be faster; what they
  cost besides shows.
  """
  taken: dict[str, list[Times]] = {name: [] for name in SPLITS}
  with prefill_backend(CONFIG, PROMPT, (CHUNK,), SPLITS) as backend:
    for turn in range(turns + 1):
      for name in SPLITS:
        times = timed(
          lambda n=name: prefill_chunks(backend, 0, PROMPT, CHUNK, n)
        )
        if turn:  # the first compiles
          taken[name].append(times)
  wall_s = {name: min(t.wall_s for t in all_) for name, all_ in taken.items()}
  cpu_s = {name: min(t.cpu_s for t in all_) for name, all_ in taken.items()}
  name = f'cpp.{PROMPT}_tokens'
  what = 'speed of two stages, of one stage in these turns'
  return [
    Row(f'{name}.one_stage_s', wall_s['one'], 's', f'chunks of {CHUNK}'),
    Row(f'{name}.two_stages_s', wall_s['two'], 's', f'chunks of {CHUNK}'),
    Row(
      f'{name}.two_stages',
      wall_s['one'] / wall_s['two'],
      'ratio',
      what,
      target=TWO_STAGES,
    ),
    Row(
      f'{name}.two_stages_cpu',
      cpu_s['one'] / cpu_s['two'],
      'ratio',
      f'{what}, by CPU-seconds',
    ),
  ]


def timed(work: Callable[[], object]) -> Times:
  """Seconds on the clock and of all threads."""
  cpu_s, wall_s = time.process_time(), time.perf_counter()
  work()
  return Times(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def memory(quick: bool) -> list[Row]:
  """Live arrays of a long prompt, against KVCache and weights alone."""
  tokens = QUICK_LONG if quick else LONG
  config = replace(CONFIG, max_tokens=tokens)
  peak, seconds = live_bytes(config, tokens, CHUNK)
  least = kv_bytes(config, tokens, 4) + 4 * config.num_params
  return [
    Row(f'cpp.{tokens}_tokens.live_bytes', peak, 'B', f'{seconds:.0f} s'),
    Row(
      f'cpp.{tokens}_tokens.live',
      peak / least,
      'ratio',
      'most bytes of live arrays, of M_KV and weights',
      target=LIVE,
      at_most=True,
    ),
  ]


def live_bytes(
  config: ModelConfig, tokens: int, chunk: int
) -> tuple[int, float]:
  """Most bytes of live arrays in a process of its own, and its seconds."""
  about = {'threads': 64, 'config': config.to_hf()}
  about |= {'chunks': [chunk], 'max_tokens': tokens}
  with ours('scripts.benches.prefill_turns', about) as program:
    found = program.ask('peak', HOUR_S, stop=tokens, chunk=chunk)
  return found['peak_bytes'], found['wall_s']

# SPDX-License-Identifier: Apache-2.0
"""Decode steps against the machine's memory bandwidth and other systems.

Each program runs in a process of its own with as many threads, and they take
turns. One thread's times are CPU-seconds, which other work on the machine
does not add to; several threads' are seconds on the clock. The best turn
counts.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack

from mooncake_jax.blocks.accounting import kv_bytes
from scripts.benches import limits
from scripts.benches.host_step import host_rows
from scripts.benches.model import CONFIG
from scripts.benches.rows import Row
from scripts.benches.turns import interpreter
from scripts.benches.turns import ours
from scripts.benches.turns import peer
from scripts.benches.turns import Turns

Case = tuple[int, int]  # (rows, context tokens of each)
QUICK: tuple[Case, ...] = ((1, 512), (8, 512))
CASES: tuple[Case, ...] = tuple(
  (batch, context)
  for batch in (1, 8, 32)
  for context in (128, 512, 2048, 8192)
  if batch * context <= 65536  # 3 GiB of KVCache
)
PEERED: tuple[Case, ...] = ((1, 512), (8, 512))
# Our throughput of theirs that is asked for, by rows.
PEERS: dict[str, dict[int, float | None]] = {
  'transformers': {1: 2.0, 8: 2.0},
  'vllm': {1: 1.3, 8: 1.0},
  'llama_cpp': {1: None, 8: None},
}
STEPS = 8  # a turn
READS = 8
SHARE = 0.6


def decode(quick: bool) -> list[Row]:
  """Throughput, share of bandwidth, ratio to a peer; the host's own time."""
  rows = []
  for threads in (1,) if quick else (1, 2):
    cases = QUICK if quick else CASES
    best, names = measure(threads, cases, 2 if quick else 5)
    rows += throughput_rows(threads, best, names)
  return [*rows, *host_rows(quick)]


def measure(
  threads: int, cases: Sequence[Case], turns: int
) -> tuple[dict[tuple[str, Case | None], float], dict[str, str]]:
  """Best seconds of a step by program and case; None is one read."""
  taken: dict[tuple[str, Case | None], list[float]] = defaultdict(list)
  with ExitStack() as stack:
    programs = _start(stack, threads, cases)
    for turn in range(turns + 1):
      for who, program in programs.items():
        for case in (None, *cases) if who == 'ours' else PEERED:
          seconds = _turn(program, threads, case)
          if turn:  # the first compiles
            taken[who, case].append(seconds)
    names = {who: program.name for who, program in programs.items()}
  return {key: min(found) for key, found in taken.items()}, names


def _start(
  stack: ExitStack, threads: int, cases: Sequence[Case]
) -> dict[str, Turns]:
  own = {'threads': threads, 'cases': cases}
  program = ours('scripts.benches.decode_turns', own)
  programs = {'ours': stack.enter_context(program)}
  about = {'threads': threads, 'config': CONFIG.to_hf()}
  for name in filter(interpreter, PEERS):
    program = peer(name, f'{name}_turns.py', about)
    programs[name] = stack.enter_context(program)
  return programs


def _turn(program: Turns, threads: int, case: Case | None) -> float:
  if case is None:
    times, count = program.work('read', count=READS), READS
  else:
    batch, context = case
    about = {'batch': batch, 'context': context, 'steps': STEPS}
    times, count = program.work('decode', **about), STEPS
  return (times.cpu_s if threads == 1 else times.wall_s) / count


def throughput_rows(
  threads: int,
  best: dict[tuple[str, Case | None], float],
  names: dict[str, str],
) -> list[Row]:
  """All figures of one number of threads."""
  name = f'decode.{threads}_threads'
  clock = 'CPU-seconds' if threads == 1 else 'wall'
  peak = limits.READ_BYTES / best['ours', None]
  rows = [Row(f'{name}.read_bytes_per_s', peak, 'B/s', clock)]
  for (who, case), seconds in best.items():
    if who == 'ours' and case is not None:
      rows += _case_rows(name, case, seconds, peak)
      if case in PEERED:
        for other in PEERS:
          theirs = best.get((other, case))
          about = names.get(other, 'not installed: make peers')
          rows += _peer_rows(name, case, seconds, other, theirs, about)
  return rows


def _case_rows(name: str, case: Case, seconds: float, peak: float) -> list[Row]:
  batch, context = case
  name = f'{name}.{batch}x{context}'
  share = step_bytes(case) / seconds / peak
  own = 'read_bytes_per_s of these turns'
  target = SHARE if case == (1, 512) else None
  return [
    Row(f'{name}.tokens_per_s', batch / seconds, 'tokens/s'),
    Row(f'{name}.bandwidth_share', share, 'ratio', own, target=target),
  ]


def _peer_rows(
  name: str,
  case: Case,
  seconds: float,
  other: str,
  theirs: float | None,
  about: str,
) -> list[Row]:
  batch, context = case
  name = f'{name}.{batch}x{context}'
  if theirs is None:
    return [Row(f'{name}.of_{other}', None, 'ratio', about)]
  what = 'our throughput, of theirs in these turns'
  ratio, target = theirs / seconds, PEERS[other][batch]
  return [
    Row(f'{name}.{other}.tokens_per_s', batch / theirs, 'tokens/s', about),
    Row(f'{name}.of_{other}', ratio, 'ratio', what, target=target),
  ]


def step_bytes(case: Case) -> int:
  """Weights and KVCache, float32, that a step must read once."""
  batch, context = case
  per_layer = CONFIG.num_layer_matmul_params + 2 * CONFIG.model_dim
  weights = CONFIG.num_layers * per_layer
  weights += CONFIG.vocab_size * CONFIG.model_dim + CONFIG.model_dim
  return 4 * weights + kv_bytes(CONFIG, batch * context, 4)

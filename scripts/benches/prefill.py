# SPDX-License-Identifier: Apache-2.0
"""Prefill by one instance: its share of the machine, and other systems' speed.

Each program runs in a process of its own with as many threads, and they take
turns. One thread's times are CPU-seconds, which other work on the machine
does not add to; several threads' are seconds on the clock. The best turn
counts.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from scripts.benches import limits
from scripts.benches.model import CONFIG
from scripts.benches.rows import Row
from scripts.benches.turns import interpreter
from scripts.benches.turns import ours
from scripts.benches.turns import peer
from scripts.benches.turns import Times
from scripts.benches.turns import Turns

PROMPTS = (512, 2048)  # tokens
CHUNKS = (128, 256, 512, 1024, 2048)
QUICK_CHUNKS = (256, 512, 1024, 2048)
PREFIXES = (0, 1024, 4096)  # tokens before a chunk of ON_PREFIX
ON_PREFIX = 256
PEERS = ('transformers', 'vllm')
GEMMS = 10  # products a turn
SHARE, AHEAD, CHUNKED = 0.75, 1.1, 1.05


class Work(NamedTuple):
  """What a program does in a turn.

  Attributes:
    kind: 'gemm'; 'prefill' of tokens [start, stop) in chunks.
  """

  kind: str
  start: int = 0
  stop: int = 0
  chunk: int = 0


GEMM = Work('gemm')


def prefill(quick: bool) -> list[Row]:
  """Throughput, share of matrix products, ratios to peers and to one chunk."""
  rows = []
  chunks = QUICK_CHUNKS if quick else CHUNKS
  for threads in (1,) if quick else (1, 2):
    best, names = measure(threads, our_works(chunks), 2 if quick else 6)
    rows += throughput_rows(threads, best, names)
  return rows


def our_works(chunks: Sequence[int]) -> list[Work]:
  whole = [Work('prefill', 0, t, c) for t in PROMPTS for c in chunks if c <= t]
  on_prefix = [Work('prefill', p, p + ON_PREFIX, ON_PREFIX) for p in PREFIXES]
  return [GEMM, *whole, *on_prefix]


def measure(
  threads: int, works: Sequence[Work], turns: int
) -> tuple[dict[tuple[str, Work], float], dict[str, str]]:
  """Best seconds by program and work, and each program's full name."""
  taken: dict[tuple[str, Work], list[float]] = defaultdict(list)
  theirs = [Work('prefill', 0, tokens, tokens) for tokens in PROMPTS]
  with ExitStack() as stack:
    programs = _start(stack, threads, works)
    for turn in range(turns + 1):
      for who, program in programs.items():
        for work in works if who == 'ours' else theirs:
          times = _turn(program, who, work)
          if turn:  # the first compiles
            seconds = times.cpu_s if threads == 1 else times.wall_s
            taken[who, work].append(seconds)
    names = {who: program.name for who, program in programs.items()}
  return {key: min(found) for key, found in taken.items()}, names


def _start(
  stack: ExitStack, threads: int, works: Sequence[Work]
) -> dict[str, Turns]:
  about = {'threads': threads, 'config': CONFIG.to_hf()}
  own = about | {
    'chunks': sorted({work.chunk for work in works} - {0}),
    'max_tokens': max(work.stop for work in works),
  }
  module = 'scripts.benches.prefill_turns'
  programs = {'ours': stack.enter_context(ours(module, own))}
  for name in PEERS:
    if interpreter(name):
      program = peer(name, f'{name}_turns.py', about)
      programs[name] = stack.enter_context(program)
  return programs


def _turn(program: Turns, who: str, work: Work) -> Times:
  if work is GEMM:
    return program.work('gemm', count=GEMMS)
  if who != 'ours':
    return program.work('prefill', tokens=work.stop)
  _, start, stop, chunk = work
  return program.work('prefill', start=start, stop=stop, chunk=chunk)


def throughput_rows(
  threads: int, best: dict[tuple[str, Work], float], names: dict[str, str]
) -> list[Row]:
  """All figures of one number of threads."""
  gemm = limits.GEMM_FLOPS * GEMMS / best['ours', GEMM]
  name = f'prefill.{threads}_threads'
  clock = 'CPU-seconds' if threads == 1 else 'wall'
  rows = [Row(f'{name}.gemm_flops_per_s', gemm, 'FLOP/s', clock)]
  for tokens in PROMPTS:
    rows += _prompt_rows(f'{name}.{tokens}', tokens, gemm, best, names)
  return [*rows, *_on_prefix_rows(name, gemm, best)]


def _on_prefix_rows(
  name: str, gemm: float, best: dict[tuple[str, Work], float]
) -> list[Row]:
  """One chunk on a growing prefix."""
  rows = []
  for (who, work), seconds in best.items():
    if who == 'ours' and work.stop - work.start == ON_PREFIX:
      share = CONFIG.prefill_flops(work.start, work.stop) / seconds / gemm
      metric = f'{name}.{ON_PREFIX}_on_{work.start}.gemm_share'
      rows.append(Row(metric, share, 'ratio', f'{seconds:.3g} s a chunk'))
  return rows


def _prompt_rows(
  name: str,
  tokens: int,
  gemm: float,
  best: dict[tuple[str, Work], float],
  names: dict[str, str],
) -> list[Row]:
  by_chunk = {
    work.chunk: seconds
    for (who, work), seconds in best.items()
    if who == 'ours' and (work.start, work.stop) == (0, tokens)
  }
  chunk = min(by_chunk, key=lambda c: by_chunk[c])
  seconds = by_chunk[chunk]
  share = CONFIG.prefill_flops(0, tokens) / seconds / gemm
  own = 'gemm_flops_per_s of these turns'
  rows = [
    Row(f'{name}.tokens_per_s', tokens / seconds, 'tokens/s', f'{chunk=}'),
    Row(f'{name}.gemm_share', share, 'ratio', own, target=SHARE),
    *_chunk_rows(name, tokens, by_chunk),
  ]
  for who in PEERS:
    rows += _peer_rows(name, tokens, who, seconds, best, names)
  return rows


def _chunk_rows(
  name: str, tokens: int, by_chunk: dict[int, float]
) -> list[Row]:
  """Every chunk size, and the best against the whole prompt at once."""
  rows = [
    Row(f'{name}.chunk_{chunk}.tokens_per_s', tokens / seconds, 'tokens/s')
    for chunk, seconds in by_chunk.items()
  ]
  whole = by_chunk.pop(tokens, None)
  if whole is None or not by_chunk:
    return rows
  ratio = min(by_chunk.values()) / whole
  what = 'seconds in chunks of the best size, of those in one program'
  return [
    *rows,
    Row(f'{name}.chunked', ratio, 'ratio', what, target=CHUNKED, at_most=True),
  ]


def _peer_rows(
  name: str,
  tokens: int,
  who: str,
  seconds: float,
  best: dict[tuple[str, Work], float],
  names: dict[str, str],
) -> list[Row]:
  if who not in names:
    why = 'not installed: make peers'
    return [Row(f'{name}.of_{who}', None, 'ratio', why)]
  theirs = best[who, Work('prefill', 0, tokens, tokens)]
  speed = Row(
    f'{name}.{who}.tokens_per_s', tokens / theirs, 'tokens/s', names[who]
  )
  target = AHEAD if who == 'transformers' else 1.0
  ratio = theirs / seconds
  what = 'our throughput, of theirs in these turns'
  return [speed, Row(f'{name}.of_{who}', ratio, 'ratio', what, target=target)]

# SPDX-License-Identifier: Apache-2.0
"""The prefix index beside Dynamo's RadixTree, on the conversation trace.

Both are told and asked the same, each in a process of its own on one core, in
turns; CPU-seconds, the best turn. A holey index has lost a share of its blocks
from the middle of chains: a match must end there, and go on once the block is
back. Answers are held against sets of blocks.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
import json
from pathlib import Path
import tempfile
from typing import Any

from scripts.benches.index_stream import scores
from scripts.benches.index_stream import serving
from scripts.benches.index_stream import Stream
from scripts.benches.rows import Row
from scripts.benches.turns import interpreter
from scripts.benches.turns import ours
from scripts.benches.turns import peer
from scripts.benches.turns import Turns
from scripts.workloads import published

TRACE = 'conversation_trace.jsonl'
PEER = 'dynamo'
QUERIES, STORED = 1.0, 0.5  # of theirs
HOLES = 0.1
EVERY = 50  # queries to an answer that is checked
TURNS = 5


@dataclass(frozen=True)
class Case:
  """How many workers serve the trace, and what each can hold."""

  num_workers: int
  capacity_blocks: int = 1 << 40

  @property
  def name(self) -> str:
    evicting = '.evicting' if self.capacity_blocks < 1 << 40 else ''
    return f'index.{self.num_workers}_workers{evicting}'


CASES = (Case(8), Case(8, 5000), Case(100), Case(500))
QUICK = CASES[:2]


def index(quick: bool) -> list[Row]:
  """Queries and stored blocks a second, what they weigh, who is right."""
  rows = published(TRACE).rows[: 3000 if quick else None]
  found = []
  for case in QUICK if quick else CASES:
    stream = serving(rows, case.num_workers, case.capacity_blocks, HOLES)
    found += Measured(stream, 2 if quick else TURNS).rows(case.name)
  return found


class Measured:
  """One stream, run by all programs."""

  def __init__(self, stream: Stream, turns: int):
    self._stream = stream
    self._turns = turns
    self._seconds: dict[tuple[str, str], float] = {}
    self._said: dict[tuple[str, str], Any] = {}
    self._names: dict[str, str] = {}
    with ExitStack() as stack:
      folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
      self._run(stack, folder)

  def rows(self, name: str) -> list[Row]:
    """All figures of it."""
    blocks, queries = self._stream.num_stored_blocks, self._stream.num_queries
    rows = []
    for who in self._names:
      rows += self._rows_of(who, f'{name}.{who}')
    if PEER not in self._names:
      why = 'not installed: make peers'
      return [*rows, Row(f'{name}.of_radix_tree', None, 'ratio', why)]
    of = f'{name}.of_radix_tree'
    what = f'{queries} queries, {blocks} stored blocks'
    return [
      *rows,
      self._ratio(f'{of}.queries', 'ask', QUERIES, what),
      self._ratio(f'{of}.holey_queries', 'ask_holey', QUERIES, what),
      self._ratio(f'{of}.scores_of_all', 'score', None, what),
      self._ratio(f'{of}.stored_blocks', 'build', STORED, what),
    ]

  def _ratio(
    self, metric: str, work: str, target: float | None, what: str
  ) -> Row:
    theirs, own = (self._seconds[who, work] for who in (PEER, 'ours'))
    return Row(metric, theirs / own, 'ratio', what, target=target)

  def _rows_of(self, who: str, name: str) -> list[Row]:
    stream, own = self._stream, who == 'ours'
    version = self._names[who]

    def rate(count: int, work: str) -> float:
      return count / self._seconds[who, work]

    right = [
      Row(
        f'{name}.{state}_right',
        _share_right(self._said[who, state], stream, state),
        'ratio',
        'answers that equal sets of blocks, by query and worker',
        target=1.0 if own else None,
      )
      for state in ('whole', 'holey', 'refilled')
    ]
    return [
      Row(f'{name}.queries', rate(stream.num_queries, 'ask'), '1/s', version),
      Row(f'{name}.stored', rate(stream.num_stored_blocks, 'build'), '1/s'),
      Row(
        f'{name}.bytes_per_block',
        self._said[who, 'weigh'] / stream.num_distinct_blocks,
        'B',
        'resident memory, keys included',
      ),
      *right,
    ]

  def _run(self, stack: ExitStack, folder: Path) -> None:
    path = folder / 'stream.json'
    path.write_text(json.dumps(self._stream.to_dict()))
    about = {'stream': str(path)}
    module = 'scripts.benches.index_turns'
    programs = {'ours': stack.enter_context(ours(module, about))}
    if interpreter(PEER):
      program = peer(PEER, 'radix_tree_turns.py', about)
      programs[PEER] = stack.enter_context(program)
    self._names = {who: program.name for who, program in programs.items()}
    for who, program in programs.items():
      self._tell(who, program, 'weigh', folder, 'weigh')
    for _ in range(self._turns):
      self._turn(programs, ('build', 'ask', 'score'))
    self._holey(programs, folder)

  def _holey(self, programs: dict[str, Turns], folder: Path) -> None:
    """Answers, and how long they take, with holes and when they are filled."""
    for state, told in (('whole', ''), ('holey', 'holes')):
      for who, program in programs.items():
        if told:
          program.work('hear', which=told)
        self._tell(who, program, 'answer', folder, state, every=EVERY)
    for _ in range(self._turns):
      self._turn(programs, ('ask',), '_holey')
    for who, program in programs.items():
      program.work('hear', which='refills')
      self._tell(who, program, 'answer', folder, 'refilled', every=EVERY)

  def _turn(
    self, programs: dict[str, Turns], works: Sequence[str], suffix: str = ''
  ) -> None:
    for work in works:
      for who, program in programs.items():
        key = who, work + suffix
        cpu_s = program.work(work).cpu_s
        self._seconds[key] = min(cpu_s, self._seconds.get(key, cpu_s))

  def _tell(
    self,
    who: str,
    program: Turns,
    work: str,
    folder: Path,
    about: str,
    **arguments: Any,
  ) -> None:
    path = folder / f'{who}.{about}.json'
    program.work(work, path=str(path), **arguments)
    self._said[who, about] = json.loads(path.read_text())


def _share_right(said: list, stream: Stream, state: str) -> float:
  """Answers to (query, worker) that are as they should be."""
  truth = scores(stream, state, EVERY)
  workers = range(stream.num_workers)
  same = sum(
    dict(map(tuple, answer)).get(worker, 0) == true.get(worker, 0)
    for answer, true in zip(said, truth)
    for worker in workers
  )
  return same / (len(truth) * len(workers))

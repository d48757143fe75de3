# SPDX-License-Identifier: Apache-2.0
"""Our prefix index on a stream of ops, in turns with another.

python -m scripts.benches.index_turns '{"stream": "stream.json"}'

See `scripts/peers/radix_tree_turns.py`, which does the same.
"""

from collections import Counter
from collections.abc import Iterable
import json
from pathlib import Path
import sys

from mooncake_jax.conductor.matches import positions
from mooncake_jax.conductor.prefix_index import PrefixIndex
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import StoreEvent
from mooncake_jax.request import BlockKey
from scripts.peers.turns import Child
from scripts.peers.turns import resident_bytes


class Program:
  """One index and the stream it is told and asked."""

  def __init__(self, stream: dict):
    self._names = tuple(f'worker{i}' for i in range(stream['num_workers']))
    self._stream = stream
    self._index = PrefixIndex(self._names)
    self._seqs: Counter[int] = Counter()
    self._events = {
      name: list(self._events_of(stream[name]))
      for name in ('ops', 'holes', 'refills')
    }
    self.queries = [_keys(op[1]) for op in stream['ops'] if op[0] == 'query']

  def build(self) -> None:
    self._index = PrefixIndex(self._names)
    self.hear('ops')

  def hear(self, which: str) -> None:
    observe = self._index.observe
    for event in self._events[which]:
      observe(event)

  def ask(self) -> None:
    """What the Conductor asks: who can reuse how much, in groups."""
    match = self._index.match
    for keys in self.queries:
      match(keys).groups()

  def score(self) -> None:
    """What RadixTree answers: a number for each worker."""
    for keys in self.queries:
      self.scores(keys)

  def weigh(self, path: str) -> None:
    """Writes what memory grows by, keys included."""
    self._index = PrefixIndex(self._names)
    self._seqs.clear()
    before = resident_bytes()
    for event in self._events_of(self._stream['ops']):
      self._index.observe(event)
    _write(path, resident_bytes() - before)

  def answer(self, path: str, every: int) -> None:
    """Writes the scores of every so many queries."""
    scores = (self.scores(keys) for keys in self.queries[::every])
    _write(path, [list(found.items()) for found in scores])

  def scores(self, keys: tuple[BlockKey, ...]) -> dict[int, int]:
    return {
      position: group.usable
      for group in self._index.match(keys).groups()
      for position in positions(group.mask)
    }

  def _events_of(self, ops) -> Iterable[StoreEvent]:
    for kind, *about in ops:
      if kind == 'query':
        continue
      worker, keys = about[0], _keys(about[-1])
      self._seqs[worker] += 1
      event = BlocksStored if kind == 'stored' else BlocksEvicted
      yield event(0.0, self._names[worker], keys, 'host', self._seqs[worker])


def _keys(ids: Iterable[int]) -> tuple[BlockKey, ...]:
  """Keys of the length of ours: 32 bytes."""
  return tuple(i.to_bytes(32, 'big') for i in ids)


def _write(path: str, value) -> None:
  Path(path).write_text(json.dumps(value))


def main(stream: str) -> None:
  child = Child(threads=1)
  program = Program(json.loads(Path(stream).read_text()))
  works = ('build', 'hear', 'ask', 'score', 'weigh', 'answer')
  child.answer({work: getattr(program, work) for work in works}, 'mooncake_jax')


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""Dynamo's prefix index; runs in the peer's own environment.

python scripts/peers/radix_tree_turns.py '{"stream": "stream.json"}'

Ops are those of `scripts/benches/index_stream.py`; what `scripts/benches/
index_turns.py` does with our index is done here with theirs.
"""

from importlib import metadata
import json
import sys

from turns import Child  # of this folder
from turns import resident_bytes


class Program:
  """One index and the stream it is told and asked."""

  def __init__(self, stream: dict, make):
    self._make = make
    self.num_refused = 0
    self.tree = make()
    self.events = {
      name: [(op[1], _bytes(op)) for op in stream[name] if op[0] != 'query']
      for name in ('ops', 'holes', 'refills')
    }
    self.queries = [op[1] for op in stream['ops'] if op[0] == 'query']

  def build(self) -> None:
    self.tree = self._make()
    self.hear('ops')

  def hear(self, which: str) -> None:
    apply_event = self.tree.apply_event
    for worker, event in self.events[which]:
      try:
        apply_event(worker, event)
      except RuntimeError:  # a block behind another hole: gone with it
        self.num_refused += 1
    self.tree.find_matches([])  # whatever is still queued is done after this

  def ask(self) -> None:
    find_matches = self.tree.find_matches
    for ids in self.queries:
      find_matches(ids)

  def score(self) -> None:
    find_matches = self.tree.find_matches
    for ids in self.queries:
      _ = find_matches(ids).scores

  def weigh(self, path: str) -> None:
    self.tree = self._make()
    before = resident_bytes()
    self.hear('ops')
    _write(path, resident_bytes() - before)

  def answer(self, path: str, every: int) -> None:
    answers = map(self.tree.find_matches, self.queries[::every])
    _write(path, [[[w, n] for (w, _), n in a.scores.items()] for a in answers])


def _bytes(op) -> bytes:
  if op[0] == 'stored':
    blocks = [{'block_hash': i, 'tokens_hash': i} for i in op[3]]
    data = {'stored': {'parent_hash': op[2], 'blocks': blocks}}
  else:
    data = {'removed': {'block_hashes': op[2]}}
  event = {'event_id': 0, 'data': data, 'dp_rank': 0}
  return json.dumps(event).encode()


def _write(path: str, value) -> None:
  with open(path, 'w') as file:
    json.dump(value, file)


def main(stream: str) -> None:
  child = Child(threads=1)
  from dynamo._core import RadixTree  # pyright: ignore[reportMissingImports]

  with open(stream) as file:
    program = Program(json.load(file), RadixTree)
  works = ('build', 'hear', 'ask', 'score', 'weigh', 'answer')
  version = metadata.version('ai-dynamo-runtime')
  child.answer(
    {work: getattr(program, work) for work in works},
    f'RadixTree of ai-dynamo-runtime {version}',
  )


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))

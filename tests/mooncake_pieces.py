# SPDX-License-Identifier: Apache-2.0
"""Blocks whose bytes follow from a number, in this process and in a peer.

As a program it is the peer: a segment in a process of its own, told by lines
on its input what to do ('put 3', 'read 3'), answering a line each.
"""

from contextlib import contextmanager
from pathlib import Path
import subprocess
import sys

import numpy as np

from mooncake_jax.backend import Replica
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.mooncake_errors import MooncakeError
from mooncake_jax.transfer.mooncake_store import MooncakeSegment
from mooncake_jax.transfer.segment import Part

BLOCK = BlockFormat(3, 64, 2, 64, np.dtype('float32'))  # 192 KiB
LAYER_RANGES = ((0, 2), (2, 3))
MIB = 1 << 20


def open_segment(master: str, **config) -> MooncakeSegment:
  fields = {'timeout_s': 3.0, 'staging_blocks': 8, 'pause_s': 0.2, **config}
  made = MooncakeConfig(master, **fields)
  return MooncakeSegment('mooncake', made, BLOCK, 1 << 40)


def block_of(number: int) -> np.ndarray:
  rng = np.random.default_rng(number)
  shape = BLOCK.shape(0, BLOCK.num_layers)
  return rng.standard_normal(shape).astype(BLOCK.dtype)


def replica_of(number: int, replica_id: int | None = None) -> Replica:
  key = number.to_bytes(32, 'big')
  return Replica('mooncake', number if replica_id is None else replica_id, key)


def put(segment: MooncakeSegment, number: int, replica_id: int | None = None):
  """Puts a block in parts by layers, each in two slices of its heads."""
  replica, block_L2SKH = replica_of(number, replica_id), block_of(number)
  try:
    for start, stop in LAYER_RANGES:
      part_L2SKH = block_L2SKH[start:stop]
      slices = (part_L2SKH[:, :, :, :1], part_L2SKH[:, :, :, 1:])
      segment.store(replica, Part(start, stop, slices))
      segment.keep(replica, (start, stop))
  except MooncakeError:
    segment.drop([replica])  # as the deciders do
    raise


def read(
  segment: MooncakeSegment, number: int, replica_id: int | None = None
) -> np.ndarray:
  replica = replica_of(number, replica_id)
  parts = [
    segment.read(replica, layers)
    for layers in segment.ranges(replica, 0, BLOCK.num_layers)
  ]
  return np.concatenate([part.slices[0] for part in parts])


def is_right(block_L2SKH: np.ndarray, number: int) -> bool:
  return block_L2SKH.tobytes() == block_of(number).tobytes()


class Peer:
  """A segment in another process."""

  def __init__(self, process: subprocess.Popen):
    self.process = process

  def tell(self, *words: object) -> str:
    assert self.process.stdin and self.process.stdout
    print(*words, file=self.process.stdin, flush=True)
    return self.process.stdout.readline().strip()


@contextmanager
def running_peer(master: str, lent_bytes: int = 0):
  program = [sys.executable, '-m', 'tests.mooncake_pieces']
  process = subprocess.Popen(
    [*program, master, str(lent_bytes)],
    cwd=Path(__file__).parents[1],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    peer = Peer(process)
    assert peer.tell('hello') == 'ok'
    yield peer
    if process.poll() is None:
      assert peer.tell('close') == 'ok'
      assert process.wait(10) == 0
  finally:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
      assert pipe
      pipe.close()


def main(master: str, lent_bytes: int) -> None:
  segment = open_segment(master, lent_bytes=lent_bytes)
  for line in sys.stdin:
    word, *numbers = line.split()
    try:
      for number in map(int, numbers):
        if word == 'put':
          put(segment, number)
          segment.drop([replica_of(number)])
        elif not is_right(read(segment, number), number):
          raise AssertionError('wrong bytes')
      answer = 'ok'
    except Exception as error:
      answer = f'{type(error).__name__}: {error}'
    if word == 'close':
      segment.close()
    print(answer, flush=True)
    if word == 'close':
      return


if __name__ == '__main__':
  main(sys.argv[1], int(sys.argv[2]))

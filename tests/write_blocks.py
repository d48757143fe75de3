# SPDX-License-Identifier: Apache-2.0
"""Writes blocks to an SSD segment until it is killed: `write_blocks.py URL`.

Prints the number of a block once it is whole.
"""

from itertools import count
import sys

import numpy as np

from mooncake_jax.backend import Replica
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.segment import Part
from mooncake_jax.transfer.ssd import SsdSegment

BLOCK = BlockFormat(4, 128, 4, 64, np.dtype('float32'))
RANGES = ((0, 2), (2, 4))


def block_key(i: int) -> bytes:
  return i.to_bytes(32, 'big')


def block(i: int) -> np.ndarray:
  rng = np.random.default_rng(i)
  return rng.random(BLOCK.shape(0, 4), np.float32)


def main() -> None:
  segment = SsdSegment('a/ssd', sys.argv[1], 1 << 40, BLOCK)
  for i in count():
    to, whole = Replica('a/ssd', i, block_key(i)), block(i)
    for start, stop in RANGES:
      segment.store(to, Part(start, stop, (whole[start:stop],)))
      segment.keep(to, (start, stop))
    print(i, flush=True)


if __name__ == '__main__':
  main()

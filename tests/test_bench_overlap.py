# SPDX-License-Identifier: Apache-2.0
"""What the engine's profiler annotations say of a transfer."""

import jax

from mooncake_jax.backend import Replica
from scripts.benches.overlap import annotated_s
from scripts.benches.sweep import SMALL
from scripts.benches.transfers import blocks_of
from scripts.benches.transfers import NAME


def test_copies_out_of_the_pool_are_read_back_from_a_profile(tmp_path):
  with blocks_of(
    64, SMALL.num_layers, SMALL, 4 << 20, host_bytes=8 << 20
  ) as blocks:
    with jax.profiler.trace(str(tmp_path)):
      took_s = 0.0
      for i in range(4):
        took_s += blocks.move(blocks.ops(blocks.pages(i), Replica(NAME, i)))[0]
  copies_s, prefill_s = annotated_s(
    tmp_path, ('mooncake.copy_out', 'mooncake.prefill')
  )
  assert 0 < copies_s < took_s
  assert prefill_s == 0

# SPDX-License-Identifier: Apache-2.0
"""Decode's rows: what a step must read, and ratios of the turns' times."""

import jax

from mooncake_jax.blocks.accounting import kv_bytes
from mooncake_jax.model.params import abstract_params
from scripts.benches import decode
from scripts.benches import limits
from scripts.benches.model import CONFIG


def test_a_step_reads_every_weight_and_its_kvcache_once():
  leaves = jax.tree.leaves(abstract_params(CONFIG))  # tied: one table
  weights = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
  assert decode.step_bytes((8, 512)) == weights + kv_bytes(CONFIG, 4096, 4)


def test_rows_are_ratios_of_the_same_turns():
  best = {
    ('ours', None): limits.READ_BYTES / 2e10,
    ('ours', (1, 512)): decode.step_bytes((1, 512)) / 1e10,
    ('transformers', (1, 512)): 3 * decode.step_bytes((1, 512)) / 1e10,
  }
  names = {'ours': 'ours', 'transformers': 'theirs'}
  rows = {row.metric: row for row in decode.throughput_rows(1, best, names)}
  name = 'decode.1_threads.1x512'
  share = rows[f'{name}.bandwidth_share']
  assert share.value is not None and abs(share.value - 0.5) < 1e-9
  assert not share.ok
  ratio = rows[f'{name}.of_transformers']
  assert ratio.value is not None and abs(ratio.value - 3) < 1e-9 and ratio.ok

# SPDX-License-Identifier: Apache-2.0
"""Two processes with a JAX runtime each share their prompts' KVCache."""

import pytest

from mooncake_jax.transfer.mooncake_client import import_wheel
from scripts import share_prefix
from scripts.mooncake_master import running_master
from scripts.mooncake_master import running_storage

try:
  import_wheel('mooncake.store')
except ImportError as missing:
  pytest.skip(str(missing), allow_module_level=True)

SMALL = (
  'Model.path=None',
  'ModelConfig.num_layers=2',
  'ModelConfig.model_dim=64',
  'ModelConfig.mlp_dim=64',
  'ModelConfig.num_heads=4',
  'ModelConfig.num_kv_heads=2',
  'ModelConfig.head_dim=16',
  'ClusterSpec.layers_per_transfer=1',
  'ChatWorkload.num_sessions=2',
  'ChatWorkload.max_output_tokens=4',
)


def test_the_second_process_gets_what_the_first_computed():
  said = share_prefix.share(share_prefix.CONFIG, SMALL, storage_mib=64)
  first, second = said['first'], said['second']
  assert said['same_tokens'] and first['completed'] == second['completed'] == 6
  assert 'remote_store' not in first['reused_tokens']
  assert second['reused_tokens']['remote_store'] > 0
  # What the first had to compute, the second had to get, but for the tails.
  computed = first['prompt_tokens'] - sum(first['reused_tokens'].values())
  got = second['reused_tokens']['remote_store']
  assert computed - 6 * 64 <= got <= computed


def test_a_killed_owner_costs_a_recomputation_not_a_token():
  with running_master() as master:
    with running_storage(master.address, 64 << 20) as storage:
      told = (share_prefix.CONFIG, SMALL, master.address)
      first = share_prefix.run(*told)
      storage.kill()  # the master does not know yet
      second = share_prefix.run(*told)
  assert [r.output_tokens for r in first] == [r.output_tokens for r in second]
  assert not any('remote_store' in r.reused_tokens for r in second)

# SPDX-License-Identifier: Apache-2.0
"""Two processes with a JAX runtime each share a prompt's KVCache."""

import pytest

from mooncake_jax.transfer.mooncake_client import import_wheel
from scripts import share_prefix
from scripts.mooncake_master import running_master
from scripts.mooncake_master import running_storage

try:
  import_wheel('mooncake.store')
except ImportError as missing:
  pytest.skip(str(missing), allow_module_level=True)


def test_the_second_process_gets_what_the_first_computed():
  said = share_prefix.share('no such model', 300, storage_mib=64)
  assert said['first']['hit_tokens'] == 0
  assert said['first']['put_blocks'] == 2
  assert said['second']['hit_tokens'] == 256
  assert said['second']['put_blocks'] == 0
  assert said['same_tokens']


def test_a_killed_owner_costs_a_recomputation_not_a_token():
  with running_master() as master:
    with running_storage(master.address, 64 << 20) as storage:
      first = share_prefix.serve('no such model', 300, master.address)
      storage.kill()  # the master does not know yet
      second = share_prefix.serve('no such model', 300, master.address)
  assert (first['put_blocks'], second['hit_tokens']) == (2, 0)
  assert second['answer'] == first['answer']

# SPDX-License-Identifier: Apache-2.0
"""Two processes with a JAX runtime each share a prompt's KVCache."""

import pytest

from mooncake_jax.transfer.mooncake_client import import_wheel
from scripts import share_prefix

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

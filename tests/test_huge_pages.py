# SPDX-License-Identifier: Apache-2.0
"""Large arrays keep their values and their memory on huge pages."""

from pathlib import Path
import platform

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from mooncake_jax.model.huge_pages import BYTES
from mooncake_jax.model.huge_pages import on_huge_pages

SMAPS = Path('/proc/self/smaps_rollup')
OFFERED = Path('/sys/kernel/mm/transparent_hugepage')


def test_values_stay():
  size = 3 * BYTES // 4 + 5
  tree = {'large': jnp.arange(size, dtype=jnp.float32), 'small': jnp.ones(3)}
  moved = on_huge_pages(tree)
  assert moved is tree
  np.testing.assert_array_equal(moved['large'], np.arange(size, dtype='f4'))
  np.testing.assert_array_equal(moved['small'], np.ones(3))


def test_shards_of_several_devices_keep_theirs():
  mesh = jax.make_mesh((2,), ('x',), devices=jax.devices()[:2])
  spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))
  values = np.arange(2 * BYTES, dtype=np.float32)
  array = jax.device_put(values, spec)
  np.testing.assert_array_equal(on_huge_pages(array), values)


@pytest.mark.skipif(
  not (SMAPS.exists() and OFFERED.exists()), reason='no huge pages here'
)
def test_an_array_lies_on_huge_pages_where_linux_collapses():
  release = tuple(map(int, platform.release().split('.')[:2]))
  if release < (6, 1) or jax.devices()[0].platform != 'cpu':
    pytest.skip(f'Linux {platform.release()} does not collapse')
  array = jax.block_until_ready(jnp.ones(16 * BYTES // 4) * 2)
  before = _huge_kib()
  on_huge_pages(array)
  assert _huge_kib() >= before + 8 * BYTES // 1024


def _huge_kib() -> int:
  [line] = [x for x in SMAPS.read_text().splitlines() if 'AnonHuge' in x]
  return int(line.split()[1])

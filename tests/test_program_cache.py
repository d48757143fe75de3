# SPDX-License-Identifier: Apache-2.0
"""What one device has compiled serves the others, and gives the same."""

import time

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest


@pytest.mark.parametrize(
  'places', [[(0,), (3,), (7,)], [(0, 1), (2, 3), (5, 4)]]
)
def test_a_program_is_compiled_once_for_all_devices(places):
  new = time.time_ns() % 2**31  # no earlier run has compiled that
  program = jax.jit(lambda x: x @ x.T + np.int32(new))
  told: list[str] = []

  def listen(event: str, **_: str | int) -> None:
    told.append(event.rpartition('/')[2])

  x = np.arange(24, dtype=np.int32).reshape(4, 6)
  jax.monitoring.register_event_listener(listen)
  try:
    for place in places:
      devices = np.array([jax.devices()[i] for i in place])
      split = NamedSharding(Mesh(devices, 't'), PartitionSpec('t'))
      found = program(jax.device_put(x, split))
      assert found.devices() == {*devices}
      np.testing.assert_array_equal(found, x @ x.T + np.int32(new))
  finally:
    jax.monitoring.unregister_event_listener(listen)
  assert told.count('cache_misses') == 1
  assert told.count('cache_hits') == len(places) - 1

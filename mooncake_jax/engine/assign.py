# SPDX-License-Identifier: Apache-2.0
"""Which devices an instance gets."""

from collections.abc import Sequence
import itertools
from typing import Any

import jax

from mooncake_jax.engine.spec import InstanceSpec

Device = Any  # jax.Device is no type to a checker


def assign_devices(
  instances: Sequence[InstanceSpec],
) -> list[tuple[Device, ...]]:
  """Gives every instance its devices, the free ones in order.

  Raises:
    ValueError: there are too few, two instances have one name, or one shares
      those of an instance that does not come before it.
  """
  devices = jax.devices()
  names = [spec.name for spec in instances]
  if len(set(names)) < len(names):
    raise ValueError(f'two instances have one name: {names=}')
  taken = {i for spec in instances for i in spec.devices}
  free = iter([i for i in range(len(devices)) if i not in taken])
  assigned = []
  for spec in instances:
    if spec.shares_with is not None:
      assigned.append(assigned[_host(spec, names[: len(assigned)])])
      continue
    needed = spec.num_devices * spec.num_stages
    own = spec.devices or tuple(itertools.islice(free, needed))
    if len(own) < (len(spec.devices) or needed) or not all(
      i < len(devices) for i in own
    ):
      raise ValueError(
        f'InstanceSpec {spec.name!r}: num_devices={spec.num_devices} '
        f'devices={spec.devices} stages={spec.num_stages}, but '
        f'{len(devices)} devices are there and {len(own)} left for it'
      )
    if len(own) % spec.num_stages:
      raise ValueError(
        f'InstanceSpec {spec.name!r}: devices={spec.devices} do not divide '
        f'among its {spec.num_stages} stages'
      )
    assigned.append(tuple(devices[i] for i in own))
  return assigned


def _host(spec: InstanceSpec, before: list[str]) -> int:
  """Which of those before it has the devices."""
  if spec.shares_with not in before:
    raise ValueError(
      f'InstanceSpec {spec.name!r}: shares_with={spec.shares_with!r} is not '
      f'one of those before it: {before}'
    )
  return before.index(spec.shares_with)

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
  devices = _in_turns(jax.devices())
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
    assigned.append(_spread(spec, [devices[i] for i in own]))
  return assigned


def _in_turns(devices: Sequence[Device]) -> list[Device]:
  """The first of each process, then the second of each, ..."""
  of: dict[int, list[Device]] = {}
  for device in devices:
    of.setdefault(device.process_index, []).append(device)
  turns = itertools.zip_longest(*(of[process] for process in sorted(of)))
  return [device for turn in turns for device in turn if device is not None]


def _spread(
  spec: InstanceSpec, devices: Sequence[Device]
) -> tuple[Device, ...]:
  """Those of a process side by side; all processes have as many."""
  processes = [device.process_index for device in devices]
  counts = {processes.count(i) for i in range(jax.process_count())}
  if len(counts) > 1:
    raise ValueError(
      f'InstanceSpec {spec.name!r}: num_devices={spec.num_devices} must be a '
      f'multiple of the {jax.process_count()} processes, which all have a part '
      'of every instance'
    )
  return tuple(sorted(devices, key=lambda device: device.process_index))


def _host(spec: InstanceSpec, before: list[str]) -> int:
  """Which of those before it has the devices."""
  if spec.shares_with not in before:
    raise ValueError(
      f'InstanceSpec {spec.name!r}: shares_with={spec.shares_with!r} is not '
      f'one of those before it: {before}'
    )
  return before.index(spec.shares_with)

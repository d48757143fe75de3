# SPDX-License-Identifier: Apache-2.0
"""A cluster's pinned pools out to a snapshot, and in from one.

Between two steps of the cluster the books and the bytes agree; where a step was
broken off, what is in both is right.
"""

from typing import Any

import jax
import numpy as np

from mooncake_jax.blocks.segments import medium
from mooncake_jax.cluster import Cluster
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.instance import Instance
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.links import copied
from mooncake_jax.transfer.segment import Part
from mooncake_jax.transfer.segment import with_checksum
from mooncake_jax.transfer.snapshot import Blocks


def captured(cluster: Cluster, backend: DeviceBackend) -> dict[str, Blocks]:
  """All readable blocks in host memory by segment, least recently used first.

  Nothing is copied: parts stay readable when their replicas are dropped, and
  take memory until they are let go of.
  """
  pools = {}
  for name in cluster.master.segments():
    if medium(name) == 'host':
      segment = backend.instances[name].segment
      replicas = {r.key: r.replica_id for r in cluster.master.replicas(name)}
      there = segment.replica_ids
      pools[name] = [
        (key, segment.read(replicas[key], 0, cluster.layout.num_layers))
        for key in cluster.inventory(name)
        if replicas[key] in there
      ]
  return pools


def restore(
  cluster: Cluster,
  backend: DeviceBackend,
  pools: dict[str, list[tuple[BlockKey, np.ndarray]]],
) -> int:
  """Gives a new cluster the blocks [L, 2, S, K, H] of a snapshot.

  What finds no room, the least recently used, and what was of an instance
  that there is no more, is left out.

  Returns:
    How many it took.
  """
  count = 0
  for name, blocks in pools.items():
    if name not in cluster.prefill:
      continue
    instance = backend.instances[name]
    room = instance.spec.host_bytes // cluster.layout.block_bytes
    kept = dict(blocks[-room:] if room else ())
    for replica in cluster.adopt(name, kept):
      for part in _parts(cluster, instance, kept[replica.key]):
        instance.segment.put(replica.replica_id, part)
      count += 1
  return count


def _parts(
  cluster: Cluster, instance: Instance, block_L2SKH: np.ndarray
) -> list[Part]:
  """A block as the segment keeps it, in memory of its own."""
  parts = []
  for start, stop in cluster.layout.layer_ranges:
    array = _pinned(instance, (start, stop), block_L2SKH[start:stop])
    part = Part(start, stop, (array,))
    is_checked = instance.spec.checksums == 'all'
    parts.append(with_checksum(part) if is_checked else part)
  return parts


def _pinned(
  instance: Instance, layers: tuple[int, int], array: np.ndarray
) -> Any:
  ((stage, _), *_) = instance.stages_of(layers)
  ((_, target),) = stage.host_place.targets(1)
  if all(device.platform == 'cpu' for device in target.device_set):
    return copied(array)
  return jax.device_put(array, target)

# SPDX-License-Identifier: Apache-2.0
"""A cluster's Master: its segments, and what an earlier process left there."""

from mooncake_jax.backend import Backend
from mooncake_jax.backend import Replica
from mooncake_jax.blocks.segments import device_segment
from mooncake_jax.blocks.segments import Medium
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.blocks.segments import ssd_segment
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.store.eviction import POLICIES
from mooncake_jax.store.master import Master
from mooncake_jax.store.outcomes import Evicted

# The sizes of segments, by medium.
SIZES: dict[Medium, str] = {
  'device': 'device_cache_tokens',
  'host': 'host_bytes',
  'ssd': 'ssd_bytes',
  'remote': 'mooncake_bytes',
}


def make_master(spec: ClusterSpec, block_bytes: int) -> Master:
  """A Master with the empty segments of a cluster.

  Raises:
    ValueError: an eviction policy that there is not; a size that holds no
      block.
  """
  if not callable(spec.eviction) and spec.eviction not in POLICIES:
    raise ValueError(
      f'ClusterSpec.eviction={spec.eviction!r} is not one of '
      f'{", ".join(POLICIES)}'
    )
  # A put begins with the chunk that computes it, so it may get as old as its
  # request does.
  master = Master(
    spec.lease_s,
    spec.high_watermark,
    put_timeout_s=spec.request_timeout_s + spec.transfer_timeout_s,
  )
  if spec.mooncake_bytes:
    mount(master, spec, REMOTE, block_bytes)
  for name in spec.prefill_names:
    if name in spec.absent:
      continue
    for segment in segments_of(spec, name):
      mount(master, spec, segment, block_bytes)
  return master


def segments_of(spec: ClusterSpec, instance: str) -> tuple[str, ...]:
  """The segments of a prefill instance, lower tiers first."""
  return (
    *((device_segment(instance),) if spec.device_cache_tokens else ()),
    *((ssd_segment(instance),) if spec.ssd_bytes else ()),
    instance,
  )


def mount(
  master: Master, spec: ClusterSpec, segment: str, block_bytes: int
) -> None:
  """Mounts one of the cluster's segments, empty.

  Raises:
    ValueError: it would hold no block, and is not said to be of size 0.
  """
  kind, spec = medium(segment), spec.of(owner(segment))
  size = capacity_bytes = getattr(spec, SIZES[kind])
  if kind == 'device':
    capacity_bytes = size // spec.block_size_tokens * block_bytes
  if size and capacity_bytes < block_bytes:
    raise ValueError(
      f'ClusterSpec.{SIZES[kind]}={size} holds no block: one has '
      f'{spec.block_size_tokens} tokens and {block_bytes} bytes'
    )
  lower = ssd_segment(segment) if kind == 'host' and spec.ssd_bytes else None
  eviction = spec.eviction
  make = eviction if callable(eviction) else POLICIES[eviction]
  policy = make(capacity_bytes // block_bytes)
  master.mount(segment, capacity_bytes, kind, lower=lower, policy=policy)


def adopt(
  master: Master, backend: Backend, segment: str, block_bytes: int
) -> list[Replica]:
  """Takes over the blocks of this size that a process left in a segment."""
  found = [
    master.adopt(key, num_bytes, segment)
    for key, num_bytes in backend.adopt(segment)
    if num_bytes == block_bytes
  ]
  return [replica for replica in found if replica is not None]


def lose(
  master: Master, spec: ClusterSpec, segment: str, block_bytes: int
) -> tuple[Evicted, ...]:
  """Empties a segment whose bytes are lost; returns what went with them.

  Raises:
    ValueError: a device's memory, which runs are reading.
  """
  if medium(segment) == 'device':
    raise ValueError(f'{segment=} is lost with its instance only')
  gone = take_out(master, segment)
  mount(master, spec, segment, block_bytes)
  if medium(segment) == 'ssd':
    master.set_lower(owner(segment), segment)
  return gone


def take_out(master: Master, segment: str) -> tuple[Evicted, ...]:
  """Ends a segment, whoever reads there; returns what went with it."""
  gone = tuple(Evicted(r.key, r) for r in master.replicas(segment))
  return (*gone, *master.lose(segment).evicted)

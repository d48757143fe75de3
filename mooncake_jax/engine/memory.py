# SPDX-License-Identifier: Apache-2.0
"""A backend's memories: how KVCache is cut, what is registered, what moved."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping

import jax

from mooncake_jax.backend import LinkUse
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import WIRE
from mooncake_jax.engine.instance import Instance
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.transfer.far import FarTier
from mooncake_jax.transfer.far import JobLink
from mooncake_jax.transfer.links import Link
from mooncake_jax.transfer.regions import Region
from mooncake_jax.transfer.worker import LinkCount


def regions(
  instances: Mapping[str, Instance], stores: Iterable[FarTier]
) -> Iterator[Region]:
  """Pools, host and SSD segments of the instances, and stores of none."""
  for name, instance in instances.items():
    yield Region(name, 'device', range(instance.spec.num_pages))
    yield Region(name, 'host')
    if instance.ssd is not None:
      yield Region(instance.ssd.segment.name, 'ssd')
  for store in stores:
    yield Region(store.segment.name, 'remote')


def counts(
  instances: Mapping[str, Instance], tiers: Mapping[str, FarTier]
) -> dict[str, LinkCount]:
  """What each link has moved: 'prefill0-host', 'prefill0/ssd-read', ..."""
  return {link.name: link.count for _, link in _links(instances, tiers)}


def link_counts(
  instances: Mapping[str, Instance], tiers: Mapping[str, FarTier]
) -> dict[tuple[str, str], LinkCount]:
  """The same by kind and whose: ('into_host', 'prefill0'), ..."""
  return {name: link.count for name, link in _links(instances, tiers)}


def uses_since(
  before: Mapping[tuple[str, str], LinkCount],
  instances: Mapping[str, Instance],
  tiers: Mapping[str, FarTier],
) -> dict[tuple[str, str], LinkUse]:
  """What each link has carried since `link_counts` gave `before`."""
  uses = {}
  for name, now in link_counts(instances, tiers).items():
    old = before.get(name, LinkCount())
    uses[name] = LinkUse(now.num_bytes - old.num_bytes, now.busy_s - old.busy_s)
  return uses


def _links(
  instances: Mapping[str, Instance], tiers: Mapping[str, FarTier]
) -> Iterator[tuple[tuple[str, str], Link | JobLink]]:
  for name, instance in instances.items():
    yield ('into_device', name), instance.device_link
    yield ('into_host', name), instance.host_link
  for segment, tier in tiers.items():
    if segment.endswith(WIRE):  # one way, into another process
      yield ('wire', owner(segment)), tier.write_link
      continue
    yield (f'{medium(segment)}_write', owner(segment)), tier.write_link
    yield (f'{medium(segment)}_read', owner(segment)), tier.read_link


def check_layout(
  config: ModelConfig, layout: KVLayout, kv_dtype: jax.typing.DTypeLike
) -> None:
  """Raises ValueError unless the layout is this model's."""
  itemsize = jax.numpy.dtype(kv_dtype).itemsize
  expected = 2 * config.num_kv_heads * config.head_dim * itemsize
  if (layout.token_layer_bytes, layout.num_layers) != (
    expected,
    config.num_layers,
  ):
    raise ValueError(
      f"{layout=} is not this model's: token_layer_bytes={expected} in "
      f'{kv_dtype=}, num_layers={config.num_layers}'
    )

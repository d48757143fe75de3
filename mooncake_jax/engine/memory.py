# SPDX-License-Identifier: Apache-2.0
"""A backend's memories: how KVCache is cut, what is registered, what moved."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping

import jax

from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine.instance import Instance
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.transfer.far import FarTier
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
  links = [
    link
    for instance in instances.values()
    for link in (instance.device_link, instance.host_link)
  ]
  far = [
    link
    for tier in tiers.values()
    for link in (tier.write_link, tier.read_link)
  ]
  return {link.name: link.count for link in (*links, *far)}


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

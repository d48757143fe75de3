# SPDX-License-Identifier: Apache-2.0
"""Instances as a cluster's spec wants them."""

from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.instance.chunking import ChunkPlan
from mooncake_jax.instance.decode import DecodeInstance
from mooncake_jax.instance.decode import Recheck
from mooncake_jax.instance.device_cache import DeviceCache
from mooncake_jax.instance.prefill import PrefillInstance
from mooncake_jax.instance.sharing import Sharing
from mooncake_jax.instance.storing import InstanceStore
from mooncake_jax.store.client import StoreClient


def make_prefill(
  spec: ClusterSpec,
  layout: KVLayout,
  client: StoreClient,
  plan: ChunkPlan,
  name: str,
) -> PrefillInstance:
  """An idle prefill instance; with no store where reuse is off."""
  spec = spec.of(name)
  instance = PrefillInstance(
    name, layout, spec.prefill_pages, plan, spec.streaming
  )
  if spec.reuse:
    cache = None
    if spec.device_cache_tokens:
      cache = DeviceCache(name, client.master, layout, instance.pool)
    sharing = None
    if spec.mooncake_bytes:
      sharing = Sharing(name, client, spec.mooncake_put_uses)
    instance.store = InstanceStore(
      name, client, spec.promote_hits, cache, sharing
    )
  return instance


def make_decode(
  spec: ClusterSpec, layout: KVLayout, recheck: Recheck | None, name: str
) -> DecodeInstance:
  """An idle decode instance."""
  spec = spec.of(name)
  return DecodeInstance(
    name,
    layout,
    spec.decode_pages,
    spec.max_batch,
    spec.max_decode_steps,
    recheck,
    spec.decode_reserve,
  )

# SPDX-License-Identifier: Apache-2.0
"""The sizes and counts of a cluster, as a value that configs bind."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Any
from typing import get_args
from typing import Literal

from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.costs.pipeline import stage_shares
from mooncake_jax.model_config import ModelConfig

Executor = Literal['mpmd', 'spmd']
Chunking = Literal['fixed', 'dynamic', 'auto']
Streaming = Literal['layers', 'chunks', 'prompt']
KVDtype = Literal['float32', 'bfloat16', 'int8', 'float8_e4m3fn']
Reserve = Literal['all', 'prompt']


@dataclass(frozen=True)
class InstanceSizes:
  """Where an instance differs from its cluster; None is as there.

  For the fields see `ClusterSpec`. How fast it is, is a matter of costs.
  """

  tensor_parallel: int | None = None
  prefill_pool_tokens: int | None = None
  decode_pool_tokens: int | None = None
  max_batch: int | None = None
  host_bytes: int | None = None

  def __post_init__(self):
    for name, value in self.given.items():
      least = 0 if name == 'host_bytes' else 1
      if value < least:
        raise ValueError(f'InstanceSizes.{name}={value} must be >= {least}')

  @property
  def given(self) -> dict[str, int]:
    """The sizes that differ, by field."""
    return {n: value for n, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class ClusterSpec:
  """What a cluster is made of.

  Attributes:
    prefill_instances, decode_instances: how many of each.
    colocated: prefill0 and decode0 are one instance on the same devices, and
      so on: a request is decoded where it is prefilled, a decode step waits
      for the chunk that it shares the devices with, and `chunk_tokens` decides
      how long.
    tensor_parallel: devices a stage of a prefill instance, and a decode
      instance, is spread over.
    stages: of a prefill instance's pipeline; each on devices of its own.
    stage_layers: layers of each stage; () splits them as evenly as possible.
    executor: 'mpmd' runs a program a stage, 'spmd' one over all stages.
    block_size_tokens: unit of storage and reuse; 16-512 in the paper.
    page_tokens: unit of device memory; divides block_size_tokens.
    chunk_tokens: prompt tokens prefilled at once (`prefill_chunk`).
    chunking: 'fixed' chunks have chunk_tokens, 'dynamic' ones shrink so that
      all take as long, 'auto' picks one size a prompt; see
      `instance/chunking.py`.
    layers_per_transfer: layers in one part of a transfer.
    streaming: when KVCache moves: 'layers' of a prefix let the first chunk
      begin as they arrive, and leave for the store and for decode as they are
      computed; 'chunks' waits for the whole prefix and for each chunk's end,
      'prompt' for the last chunk's.
    prefill_pool_tokens, decode_pool_tokens: KVCache an instance's devices
      hold, each at least one request of max_tokens.
    device_cache_tokens: KVCache of ended prefills that stays in a prefill
      instance's device memory, beside its pool; a hit there moves nothing.
    decode_reserve: pages that a request holds on its decode instance before
      its prefill starts: for 'all' it may emit, so that it is never preempted,
      or for its 'prompt' only, and more as it goes on; see
      `instance/decode.py`.
    max_tokens: prompt + output of one request; None: the model's limit.
    max_batch: rows of a decode batch.
    max_decode_steps: steps of one decode work; a new request waits for one
      step, not for all, whatever this is.
    host_bytes: pinned host memory of a prefill instance's segment.
    ssd_bytes: capacity of a prefill instance's SSD segment; 0 is none.
    ssd_url: where its blocks lie on devices, as a tensorstore key-value
      store: 'file:///scratch/kv' gets a folder an instance. Blocks that an
      earlier run left there are hit again.
    promote_hits: a block on the SSD goes back to host memory at this hit.
    mooncake_bytes: blocks of a Mooncake Store, which other processes share,
      that the cluster keeps in mind; 0: it uses none.
    mooncake_put_uses: a block is put there at its n-th use; 1 at once.
    probe_timeout_s: how long a request waits for the store to say what it
      has of its prompt; then it goes on without.
    eviction: which block goes first: one of `store.eviction.POLICIES`, or a
      function like those there: of a segment's size in blocks, it gives a
      `Policy`.
    high_watermark: share of a segment above which puts evict.
    instances: sizes of those instances that differ, by name.
    absent: instances that are not there at the start, and may join later.
    switchable: on devices, whether each instance has the pages, host memory
      and programs of either role, so that it can change its own.
    kv_dtype: of KVCache; int8 and float8 have fixed scales a channel.
    reuse: False puts nothing and reads nothing.
    store_output: whether an output's complete blocks are put as well, for the
      next turn of a conversation; needs `reuse`.
    lease_s: how long a block is kept for a reader.
    transfer_timeout_s, request_timeout_s: deadlines of a transfer and, from
      its arrival, of a request.
  """

  prefill_instances: int = 2
  decode_instances: int = 2
  colocated: bool = False
  tensor_parallel: int = 1
  stages: int = 1
  stage_layers: tuple[int, ...] = ()
  executor: Executor = 'mpmd'
  block_size_tokens: int = 128
  page_tokens: int = 64
  chunk_tokens: int = 256
  chunking: Chunking = 'fixed'
  layers_per_transfer: int = 8
  streaming: Streaming = 'layers'
  prefill_pool_tokens: int = 8192
  decode_pool_tokens: int = 16384
  decode_reserve: Reserve = 'all'
  device_cache_tokens: int = 0
  max_tokens: int | None = None
  max_batch: int = 8
  max_decode_steps: int = 32
  host_bytes: int = 1 << 30
  ssd_bytes: int = 0
  ssd_url: str | None = None
  promote_hits: int = 2
  mooncake_bytes: int = 0
  mooncake_put_uses: int = 1
  probe_timeout_s: float = 0.1
  eviction: str | Callable[[int], Callable[[Any], float]] = 'lru'
  high_watermark: float = 0.95
  instances: Mapping[str, InstanceSizes] = field(default_factory=dict)
  absent: tuple[str, ...] = ()
  switchable: bool = False
  kv_dtype: KVDtype = 'float32'
  reuse: bool = True
  store_output: bool = True
  lease_s: float = 10.0
  transfer_timeout_s: float = 30.0
  request_timeout_s: float = 600.0

  def __post_init__(self):
    for name in (
      'prefill_instances',
      'decode_instances',
      'tensor_parallel',
      'stages',
      'block_size_tokens',
      'page_tokens',
      'chunk_tokens',
      'layers_per_transfer',
      'prefill_pool_tokens',
      'decode_pool_tokens',
      'max_batch',
      'max_decode_steps',
      'promote_hits',
      'mooncake_put_uses',
    ):
      if getattr(self, name) < 1:
        raise ValueError(
          f'ClusterSpec.{name}={getattr(self, name)!r} must be >= 1'
        )
    for name in (
      'lease_s',
      'transfer_timeout_s',
      'request_timeout_s',
      'probe_timeout_s',
    ):
      if not getattr(self, name) > 0:
        raise ValueError(
          f'ClusterSpec.{name}={getattr(self, name)!r} must be > 0 seconds'
        )
    for name in (
      'host_bytes',
      'ssd_bytes',
      'mooncake_bytes',
      'device_cache_tokens',
    ):
      if getattr(self, name) < 0:
        raise ValueError(
          f'ClusterSpec.{name}={getattr(self, name)!r} must be >= 0'
        )
    for name, names in (
      ('executor', Executor),
      ('chunking', Chunking),
      ('streaming', Streaming),
      ('decode_reserve', Reserve),
      ('kv_dtype', KVDtype),
    ):
      if getattr(self, name) not in get_args(names):
        raise ValueError(
          f'ClusterSpec.{name}={getattr(self, name)!r} is not one of '
          f'{", ".join(get_args(names))}'
        )
    self._check_names()
    if self.switchable and self.stages > 1:
      raise ValueError(
        f'ClusterSpec.switchable=True: stages={self.stages} must be 1, no '
        'pipeline decodes'
      )
    if self.colocated:
      self._check_colocated()
    if self.stage_layers:
      # Whether they are the model's number is known with the model.
      stage_shares(sum(self.stage_layers), self.stages, self.stage_layers)
    if self.block_size_tokens % self.page_tokens:
      raise ValueError(
        f'ClusterSpec.block_size_tokens={self.block_size_tokens} must be a '
        f'multiple of page_tokens={self.page_tokens}'
      )

  def _check_names(self) -> None:
    known = (*self.prefill_names, *self.decode_names)
    for field_name in ('instances', 'absent'):
      for name in getattr(self, field_name):
        if name not in known:
          raise ValueError(
            f'ClusterSpec.{field_name}: {name!r} is not one of '
            f'{", ".join(known)}'
          )
    for names in (self.prefill_names, self.decode_names):
      if {*names} <= {*self.absent}:
        raise ValueError(
          f'ClusterSpec.absent={self.absent} leaves none of {names}'
        )

  def _check_colocated(self) -> None:
    if self.prefill_instances != self.decode_instances:
      raise ValueError(
        f'ClusterSpec.colocated=True: prefill_instances='
        f'{self.prefill_instances} and decode_instances='
        f'{self.decode_instances} must be equal'
      )
    if self.stages > 1 or self.streaming == 'layers':
      raise ValueError(
        f'ClusterSpec.colocated=True: stages={self.stages} must be 1 and '
        f"streaming={self.streaming!r} 'chunks' or 'prompt': a step takes a "
        'whole chunk'
      )
    for prefill, decode in self.partners.items():
      here, there = (self.of(n).tensor_parallel for n in (prefill, decode))
      if here != there:
        raise ValueError(
          f'ClusterSpec.colocated=True: {prefill} and {decode} share devices, '
          f'but have tensor_parallel={here} and {there}'
        )

  @property
  def kv_dtype_bytes(self) -> int:
    """Bytes of one KVCache element."""
    return {'float32': 4, 'bfloat16': 2}.get(self.kv_dtype, 1)

  @property
  def partners(self) -> dict[str, str]:
    """The decode instance by the prefill instance it shares devices with."""
    if not self.colocated:
      return {}
    return dict(zip(self.prefill_names, self.decode_names))

  @property
  def prefill_names(self) -> tuple[str, ...]:
    return tuple(f'prefill{i}' for i in range(self.prefill_instances))

  @property
  def decode_names(self) -> tuple[str, ...]:
    return tuple(f'decode{i}' for i in range(self.decode_instances))

  @property
  def num_nodes(self) -> int:
    """Prefill and decode instances, a pair that shares devices being one."""
    return self.prefill_instances + (
      0 if self.colocated else self.decode_instances
    )

  def of(self, instance: str) -> 'ClusterSpec':
    """A cluster all of whose instances have the sizes of this one."""
    own = self.instances.get(instance)
    if own is None:
      return self
    return replace(self, instances={}, **own.given)

  @property
  def chunk_buckets(self) -> tuple[int, ...]:
    """Lengths that chunks are padded to: one program each.

    A quarter for short ones; where sizes vary, all multiples of it.
    """
    quarter = -(-self.chunk_tokens // 4)
    multiples = () if self.chunking == 'fixed' else (2 * quarter, 3 * quarter)
    return tuple(
      sorted(
        {min(n, self.chunk_tokens) for n in (quarter, *multiples)}
        | {self.chunk_tokens}
      )
    )

  @property
  def prefill_pages(self) -> int:
    """Pages of a prefill instance's device, scratch page included."""
    cached = self.device_cache_tokens // self.page_tokens
    return self.prefill_pool_tokens // self.page_tokens + cached + 1

  @property
  def decode_pages(self) -> int:
    """Pages of a decode instance's pool, scratch page included."""
    return self.decode_pool_tokens // self.page_tokens + 1

  def max_request_tokens(self, model: ModelConfig) -> int:
    """Longest prompt + output that is served; every pool can hold it."""
    limit = min(self.max_tokens or model.max_tokens, model.max_tokens)
    for name, tokens in self._pools():
      room = tokens // self.page_tokens * self.page_tokens
      if self.max_tokens is not None and room < limit:
        raise ValueError(
          f'ClusterSpec.{name}={tokens} cannot hold one request of '
          f'max_tokens={limit}'
        )
      limit = min(limit, room)
    return limit

  def _pools(self) -> Iterator[tuple[str, int]]:
    """All sizes of pools, by the name of the field."""
    for pool in ('prefill_pool_tokens', 'decode_pool_tokens'):
      yield pool, getattr(self, pool)
      for name, sizes in self.instances.items():
        if pool in sizes.given:
          yield f'instances[{name!r}].{pool}', sizes.given[pool]

  def layers_of_stages(self, model: ModelConfig) -> tuple[int, ...]:
    """How many of the model's layers each stage of a prefill instance has."""
    return stage_shares(model.num_layers, self.stages, self.stage_layers)

  def layout(self, model: ModelConfig) -> KVLayout:
    """How the model's KVCache is cut in this cluster."""
    token_layer_bytes = (
      2 * model.num_kv_heads * model.head_dim * self.kv_dtype_bytes
    )
    return KVLayout(
      model.num_layers,
      token_layer_bytes,
      self.page_tokens,
      self.block_size_tokens,
      min(self.layers_per_transfer, model.num_layers),
    )

# SPDX-License-Identifier: Apache-2.0
"""What one instance of the engine is made of: plain values."""

from dataclasses import dataclass
import itertools
from typing import get_args
from typing import Literal

from mooncake_jax.cluster_spec import Executor
from mooncake_jax.model.kernels import AttentionChoice

Role = Literal['prefill', 'decode', 'both']
# Which parts have a checksum: those on SSDs, or those in host memory as well.
Checksums = Literal['ssd', 'all']
LEAST_STAGING_BYTES = 64 << 20


@dataclass(frozen=True)
class InstanceSpec:
  """Sizes of one instance.

  Attributes:
    name: of the instance and of its segment.
    role: what `warmup` compiles; any instance can run any work.
    num_pages: of the device pool, scratch page 0 included.
    max_tokens: longest sequence, prompt and output together.
    num_devices: tensor parallelism of a stage; every stage gets so many of
      the devices not yet given away.
    devices: positions in `jax.devices()` instead; may be shared.
    shares_with: an instance named before this one, whose devices and owner
      thread this one has too: the programs of both run one after another.
    chunk_buckets: chunks are padded to one of these lengths, in tokens.
    max_batch: rows in a decode batch.
    batch_buckets: batches are padded to one of these; () means powers of two
      up to max_batch.
    host_bytes: capacity of the pinned host segment.
    ssd_url: where the SSD segment '<name>/ssd' lies: 'file:///folder', which
      must be there, or what tensorstore knows; of this instance alone. None
      is no such segment.
    ssd_bytes: its capacity.
    ssd_sync: whether a write to it waits for the disk.
    checksums: of parts: 'ssd', or 'all' for those in host memory too.
    staging_bytes: transfer buffers on the devices, each way; None means
      KVCache of four chunks, at least 64 MiB: two chunks' blocks on their way
      to the store and to decode. What finds no room waits behind the next
      chunk.
    stage_layers: layers of each stage of a pipeline; () is one stage of all.
      Only for prefill.
    executor: 'mpmd' runs programs on each stage, 'spmd' one over all.
    layers_per_group: a chunk is computed so many layers at a time, so that
      their KVCache leaves while the next compute; None is all at once.
    unroll: one program part a layer, else a scan over stacked layers, which
      compiles faster and takes fewer arrays. None is a scan but for decode
      steps on a CPU whose weights it would copy.
    attention: the kernel: 'jnp' runs anywhere, 'cpu' is ours in C++ for CPUs,
      'pallas' for GPUs and TPUs, 'cudnn' and 'tpu_ragged' are JAX's. 'auto' is
      'cpu' on a CPU with a C++ compiler, 'pallas' on a TPU whose tiles pages
      and heads fit (`kernels.chosen`), else 'jnp'.
  """

  name: str
  role: Role
  num_pages: int
  max_tokens: int
  num_devices: int = 1
  devices: tuple[int, ...] = ()
  shares_with: str | None = None
  chunk_buckets: tuple[int, ...] = (64, 256)
  max_batch: int = 8
  batch_buckets: tuple[int, ...] = ()
  host_bytes: int = 0
  ssd_url: str | None = None
  ssd_bytes: int = 0
  ssd_sync: bool = False
  checksums: Checksums = 'ssd'
  staging_bytes: int | None = None
  stage_layers: tuple[int, ...] = ()
  executor: Executor = 'mpmd'
  layers_per_group: int | None = None
  unroll: bool | None = None
  attention: AttentionChoice = 'auto'

  def __post_init__(self):
    counts = ('max_tokens', 'num_devices', 'max_batch')
    for field in (*counts, 'staging_bytes', 'layers_per_group'):
      if (value := getattr(self, field)) is not None and value < 1:
        self._refuse(field, 'must be >= 1')
    if self.executor not in get_args(Executor):
      self._refuse('executor', f'must be one of {get_args(Executor)}')
    if self.stage_layers and min(self.stage_layers) < 1:
      self._refuse('stage_layers', 'must be >= 1 each')
    if self.num_stages > 1 and self.role != 'prefill':
      self._refuse('role', f'must be prefill with {self.num_stages} stages')
    if self.shares_with is not None and (self.num_stages > 1 or self.devices):
      self._refuse('shares_with', 'is for one stage and no own devices')
    if self.num_pages < 2:
      self._refuse('num_pages', 'must be >= 2, page 0 is scratch')
    for field in ('host_bytes', 'ssd_bytes'):
      if getattr(self, field) < 0:
        self._refuse(field, 'must be >= 0')
    if self.ssd_bytes and self.ssd_url is None:
      self._refuse('ssd_bytes', 'needs an ssd_url')
    if self.checksums not in get_args(Checksums):
      self._refuse('checksums', f'must be one of {get_args(Checksums)}')
    if self.attention not in get_args(AttentionChoice):
      self._refuse('attention', f'must be one of {get_args(AttentionChoice)}')
    if not self.chunk_buckets or min(self.chunk_buckets) < 1:
      self._refuse('chunk_buckets', 'must be lengths >= 1')
    if self.batch_buckets and max(self.batch_buckets) < self.max_batch:
      self._refuse('batch_buckets', f'must reach max_batch={self.max_batch}')

  def _refuse(self, field: str, why: str) -> None:
    value = getattr(self, field)
    raise ValueError(f'InstanceSpec {self.name!r}: {field}={value!r} {why}')

  def can_be(self, role: str) -> bool:
    """Whether it is made for that role."""
    return self.role in (role, 'both')

  def staging_limit(self, token_bytes: int) -> int:
    """Bytes of transfer buffers; `token_bytes` is KVCache of one token."""
    if self.staging_bytes is not None:
      return self.staging_bytes
    return max(4 * max(self.chunk_buckets) * token_bytes, LEAST_STAGING_BYTES)

  @property
  def num_stages(self) -> int:
    return max(len(self.stage_layers), 1)

  def stage_ranges(self, num_layers: int) -> tuple[tuple[int, int], ...]:
    """Layers [start, stop) of each stage: (2, 1) gives [0, 2), [2, 3)."""
    if self.stage_layers and sum(self.stage_layers) != num_layers:
      self._refuse('stage_layers', f'must add up to {num_layers=}')
    ends = itertools.accumulate(self.stage_layers or (num_layers,), initial=0)
    return tuple(itertools.pairwise(ends))

  def layer_groups(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Layers [start, stop), cut at multiples of `layers_per_group`.

    By 4, [2, 9) gives [2, 4), [4, 8), [8, 9).
    """
    step = self.layers_per_group or stop
    cuts = [start, *range(start // step * step + step, stop, step), stop]
    return tuple(itertools.pairwise(cuts))

  @property
  def batch_sizes(self) -> tuple[int, ...]:
    """Batch buckets in rising order: max_batch 6 gives 1, 2, 4, 6."""
    if self.batch_buckets:
      return tuple(sorted(self.batch_buckets))
    powers = (1 << i for i in range(self.max_batch.bit_length()))
    return tuple(sorted({self.max_batch, *powers}))


def bucket(size: int, buckets: tuple[int, ...], what: str) -> int:
  """Returns the smallest bucket that holds `size`."""
  fitting = [b for b in buckets if b >= size]
  if not fitting:
    raise ValueError(f'{what}={size} exceeds the largest bucket of {buckets}')
  return min(fitting)

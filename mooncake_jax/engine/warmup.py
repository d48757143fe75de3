# SPDX-License-Identifier: Apache-2.0
"""Compiles every program before the first request, by using it once.

All works read and write scratch page 0 only, so pools stay as they are. Of
instances that are alike the first one goes ahead: the others' programs are then
loaded from JAX's cache where it has them, instead of compiled all at once.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np

from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DecodeRow
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import TransferOp
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.instance import Instance
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.request import Sampling

# The third step gets arrays that only steps have touched.
NUM_STEPS = 3


def warmup(backend: DeviceBackend) -> float:
  """Runs each program of each instance once; returns the seconds it took.

  Call it while no work is under way. The clock starts anew after it.

  Raises:
    RuntimeError: a program failed.
  """
  start_s = backend.now_s()
  there: set[str] = set()
  with _by_programs(backend):
    for specs in _turns(backend):
      new = {spec.name for spec in specs}
      there |= new
      _prefill(backend, specs)
      for op in _copies(backend, new, there):
        backend.transfer((op,), 0, float('inf'))
      _finish(backend)
      _decode(backend, specs)
  seconds = backend.now_s() - start_s
  backend.restart_clock()
  return seconds


def _turns(backend: DeviceBackend) -> Iterator[list[InstanceSpec]]:
  """The first of each kind, then all others; all at once without a cache."""
  if not jax.config.jax_compilation_cache_dir:  # pyright: ignore
    yield [instance.spec for instance in backend.instances.values()]
    return
  firsts: dict[InstanceSpec, InstanceSpec] = {}
  others = []
  for spec in (instance.spec for instance in backend.instances.values()):
    kind = replace(spec, name='', devices=(), shares_with=None, ssd_url='')
    if firsts.setdefault(kind, spec) is not spec:
      others.append(spec)
  yield [*firsts.values()]
  yield others


def _prefill(backend: DeviceBackend, specs: Sequence[InstanceSpec]) -> None:
  for spec in specs:
    if spec.role != 'decode':
      for size in spec.chunk_buckets:
        backend.prefill(spec.name, _chunk(backend, spec, size))


def _decode(backend: DeviceBackend, specs: Sequence[InstanceSpec]) -> None:
  decoders = [spec for spec in specs if spec.role != 'prefill']
  for size in sorted({b for spec in decoders for b in spec.batch_sizes}):
    for spec in decoders:
      if size in spec.batch_sizes:
        backend.decode(spec.name, _batch(backend, spec, size), NUM_STEPS)
    _finish(backend)


@contextmanager
def _by_programs(backend: DeviceBackend) -> Iterator[None]:
  """Has pages copied by programs, as they are while a CPU is busy."""
  pools = [
    stage.desk.pool
    for instance in backend.instances.values()
    for stage in instance.stages
  ]
  for pool in pools:
    pool.copies_now = False
  try:
    yield
  finally:
    for pool in pools:
      pool.copies_now = pool.can_copy_now


def _finish(backend: DeviceBackend) -> None:
  while completions := backend.wait(None):
    for completion in completions:
      if completion.status != 'completed':
        raise RuntimeError(f'warm-up: {completion.error}')


def _scratch(backend: DeviceBackend, num_tokens: int) -> tuple[int, ...]:
  return (0,) * backend.layout.pages_for(num_tokens)


def _chunk(
  backend: DeviceBackend, spec: InstanceSpec, size: int
) -> PrefillChunk:
  stop = min(size, spec.max_tokens)
  pages = _scratch(backend, stop)
  tokens = np.zeros(stop, np.int32)
  return PrefillChunk('warm-up', 0, 0, stop, pages, tokens, Sampling())


def _batch(
  backend: DeviceBackend, spec: InstanceSpec, size: int
) -> DecodeBatch:
  steps = min(NUM_STEPS, spec.max_tokens)
  row = DecodeRow('warm-up', 0, 0, 0, _scratch(backend, steps), steps)
  return DecodeBatch((row,) * min(size, spec.max_batch))


def _copies(
  backend: DeviceBackend, new: set[str], there: set[str]
) -> Iterator[TransferOp]:
  """One copy of each shape from each instance to itself and, where heads or
  layers are split otherwise, to the others; among those that are `there`, of
  which one at least is `new`."""
  layout = backend.layout
  instances = {n: i for n, i in backend.instances.items() if n in there}
  for source, at in instances.items():
    for target, to in instances.items():
      if source != target and _split(at) == _split(to):
        continue
      if source not in new and target not in new:
        continue
      shapes = {
        (_shares(at, r), _shares(to, r)): r for r in layout.layer_ranges
      }
      for layers in shapes.values():
        for size in backend.copy_sizes:
          num_bytes = layout.part_bytes(size, layers)
          pages = (0,) * size
          yield TransferOp(
            DevicePages(source, pages),
            DevicePages(target, pages),
            *layers,
            num_bytes,
          )


def _split(instance: Instance) -> tuple:
  """How the instance's devices divide heads and layers."""
  kv = instance.stages[0].desk.pool.mesh.shape['kv']
  return kv, *(stage.layers for stage in instance.stages)


def _shares(instance: Instance, layers: tuple[int, int]) -> tuple:
  """Which stages have how many of the layers, from which on."""
  return tuple(
    (stage, start - layers[0], stop - start)
    for stage, (start, stop) in instance.stages_of(layers)
  )

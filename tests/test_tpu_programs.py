# SPDX-License-Identifier: Apache-2.0
"""The programs of a TPU, compiled for one that isn't there.

A TPU stores arrays in tiles, so what costs nothing on a CPU can copy a whole
KV pool there. Only its compiler tells, which comes with libtpu: these need it
(`pip install libtpu`), and no TPU.
"""

from importlib.util import find_spec
from typing import Any

import jax
from jax import numpy as jnp
from jax.experimental import topologies
import numpy as np
import pytest

from mooncake_jax.model import pages
from mooncake_jax.model import params as model_params
from mooncake_jax.model import sharding
from mooncake_jax.model.decode import decode_step
from mooncake_jax.model.decode import DecodeState
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Sampling

pytestmark = pytest.mark.skipif(
  find_spec('libtpu') is None, reason='libtpu, the TPU compiler, is missing'
)
MODEL = ModelConfig(
  'llama',
  vocab_size=512,
  model_dim=512,
  mlp_dim=1024,
  num_layers=2,
  num_heads=16,
  num_kv_heads=8,
  head_dim=128,
  max_tokens=4096,
)
NUM_PAGES, PAGE_TOKENS, TABLE_PAGES = 2048, 64, 16
BATCH, CHUNK_TOKENS, BLOCK_PAGES = 8, 512, 8
POOL_SHARE = 0.05  # what temporaries may take: a copy would take all


@pytest.fixture(scope='module')
def mesh():
  with pytest.MonkeyPatch.context() as patch:
    # No cloud is asked which TPUs it has, and no TPU is taken from others.
    patch.setenv('TPU_SKIP_MDS_QUERY', '1')
    patch.setenv('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
    patch.setenv('TPU_ACCELERATOR_TYPE', 'v5litepod-4')
    patch.setenv('TPU_WORKER_HOSTNAMES', 'localhost')
    patch.setenv('TPU_WORKER_ID', '0')
    v5e = topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x2')
    yield sharding.make_mesh(v5e.devices[:1], MODEL)


def shapes(mesh, values: Any) -> Any:
  """As host values would lie on the mesh's devices."""
  whole = jax.NamedSharding(mesh, jax.P())

  def shape(value):
    value = np.asarray(value)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=whole)

  return jax.tree.map(shape, values)


def pool(mesh) -> jax.ShapeDtypeStruct:
  shape = pages.pool_shape(MODEL, NUM_PAGES, PAGE_TOKENS)
  placed = pages.pool_sharding(MODEL, mesh)
  return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placed)


def weights(mesh) -> Any:
  """Of stacked layers, as accelerators have them."""
  tree: Any = model_params.abstract_params(MODEL, jnp.bfloat16, mesh)

  def stack(*layers):
    spec = jax.P(None, *layers[0].sharding.spec)
    return jax.ShapeDtypeStruct(
      (len(layers), *layers[0].shape),
      layers[0].dtype,
      sharding=jax.NamedSharding(mesh, spec),
    )

  return {**tree, 'layers': jax.tree.map(stack, *tree['layers'])}


def decode(mesh, kernel):
  state = DecodeState(
    np.zeros(BATCH, np.int32),
    np.zeros(BATCH, np.int32),
    np.ones(BATCH, bool),
    np.zeros((BATCH, TABLE_PAGES), np.int32),
    SamplingRows.of([Sampling()] * BATCH),
  )
  return decode_step.trace(
    weights(mesh), MODEL, pool(mesh), shapes(mesh, state), kernel
  )


def prefill(mesh, kernel):
  host = (
    np.zeros(CHUNK_TOKENS, np.int32),
    np.zeros(TABLE_PAGES, np.int32),
    np.int32(0),
    np.int32(CHUNK_TOKENS),
    SamplingRows.of([Sampling()]),
  )
  return prefill_chunk.trace(
    weights(mesh), MODEL, pool(mesh), *shapes(mesh, host), kernel=kernel
  )


def gather(mesh, _):
  at = shapes(mesh, (np.arange(BLOCK_PAGES), np.int32(0)))
  return pages.gather_pages.trace(pool(mesh), *at, MODEL.num_layers)


def scatter(mesh, _):
  at, layer = shapes(mesh, (np.arange(BLOCK_PAGES), np.int32(0)))
  shape = (MODEL.num_layers, 2, BLOCK_PAGES * PAGE_TOKENS)
  block = jax.ShapeDtypeStruct(
    (*shape, MODEL.num_kv_heads, MODEL.head_dim),
    jnp.bfloat16,
    sharding=pages.block_sharding(MODEL, mesh),
  )
  return pages.scatter_pages.trace(pool(mesh), at, block, layer)


@pytest.mark.parametrize(
  ('program', 'kernel'),
  [
    (decode, 'jnp'),
    (decode, 'pallas'),
    (prefill, 'jnp'),
    (prefill, 'pallas'),
    (gather, None),
    (scatter, None),
  ],
)
def test_no_program_copies_the_pool(mesh, program, kernel):
  with jax.set_mesh(mesh):
    lowered = program(mesh, kernel).lower(lowering_platforms=('tpu',))
  used = lowered.compile().memory_analysis()
  kv = pool(mesh)
  temporary_bytes = used.temp_size_in_bytes
  assert temporary_bytes < POOL_SHARE * kv.size * kv.dtype.itemsize

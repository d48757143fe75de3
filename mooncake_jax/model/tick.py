# SPDX-License-Identifier: Apache-2.0
"""One tick of a pipeline: every stage advances by one chunk, in one program.

The mesh has a 'stage' axis before the tensor axes. Each stage computes the
chunk that it has, of whatever request, and passes activations to the next one;
what the last stage gives arrives at the first. A stage without a chunk runs no
layer, and a stage with fewer layers than the largest one no padding.

Z stage, L layer, T chunk token, D model, P page.
"""

import functools

import jax
from jax.sharding import PartitionSpec

from mooncake_jax.model import forward
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.params import Layers
from mooncake_jax.model.params import Params
from mooncake_jax.model.prefill import draw
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model_config import ModelConfig

STAGE = 'stage'


@functools.partial(
  jax.jit, static_argnames=('config', 'size', 'kernel'), donate_argnames='kv'
)
def tick(
  layers: Layers,
  config: ModelConfig,
  kv: jax.Array,
  x_Z1TD: jax.Array,
  page_table_ZP: jax.Array,
  start_Z: jax.Array,
  length_Z: jax.Array,
  num_layers_Z: jax.Array,
  size: int,
  kernel: AttentionKernel = 'jnp',
) -> tuple[jax.Array, jax.Array]:
  """Advances all stages, in place in `kv`; compiles once a `size`.

  All arrays are split over the stages by their first axis.

  Args:
    layers: stacked, as many for each stage; those past its own are not used.
    kv: the stages' pools behind each other [Z * L, P, 2, C, K, H], donated.
    x_Z1TD: what each stage takes.
    page_table_ZP, start_Z, length_Z: of each stage's chunk, as in prefill.
    num_layers_Z: layers to run; 0 for a stage without a chunk.
    size: tokens to compute, at least each length; the rest of T is kept.
    kernel: of attention.

  Returns:
    What each stage takes next [Z, 1, T, D], and the pools. The first stage
    has what the last one computed.
  """
  by_stage = PartitionSpec(STAGE)

  def advance(layers, kv, x_Z1TD, table_ZP, start_Z, length_Z, num_layers_Z):
    x_1TD, kv = forward.stage_fn(
      layers,
      config,
      x_Z1TD[0, :, :size],
      kv,
      table_ZP,
      start_Z,
      start_Z + length_Z,
      0,
      num_layers_Z[0],
      kernel,
    )
    num_stages = jax.lax.axis_size(STAGE)
    ring = [(i, (i + 1) % num_stages) for i in range(num_stages)]
    passed_Z1TD = jax.lax.ppermute(x_1TD[None], STAGE, ring)
    at = (0, 0, 0, 0)
    return jax.lax.dynamic_update_slice(x_Z1TD, passed_Z1TD, at), kv

  return jax.shard_map(
    advance,
    in_specs=(by_stage,) * 7,
    out_specs=(by_stage, by_stage),
    axis_names={STAGE},
  )(layers, kv, x_Z1TD, page_table_ZP, start_Z, length_Z, num_layers_Z)


@jax.jit
def enter(params: Params, tokens_T: jax.Array) -> jax.Array:
  """What the first stage takes of a chunk: [1, 1, T, D]."""
  return forward.embed(params, tokens_T[None])[None]


@functools.partial(jax.jit, static_argnames='config')
def leave(
  params: Params,
  config: ModelConfig,
  x_11TD: jax.Array,
  start: jax.Array,
  length: jax.Array,
  sampling: SamplingRows,
) -> tuple[jax.Array, jax.Array]:
  """Draws the token after a chunk that left the last stage; see `draw`."""
  return draw(params, config, x_11TD[0], start + length, length, sampling)

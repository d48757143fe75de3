# SPDX-License-Identifier: Apache-2.0
"""The KV pool: pages of a mesh's memory, and blocks in and out of them.

One array [L, P, 2, C, K, H] holds keys (0) and values (1) of all layers of a
stage. It is donated to every step and written in place. Page 0 is scratch.

A block's bytes are canonical: [L, 2, S, K, H], the same for any page size
and any mesh. L layer, P page, C token in a page, n pages of a block,
S = n * C its tokens, K KV head, H head dim.
"""

import functools

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
import numpy as np

from mooncake_jax.model import sharding
from mooncake_jax.model_config import ModelConfig


def pool_shape(
  config: ModelConfig,
  num_pages: int,
  page_tokens: int,
  num_layers: int | None = None,
) -> tuple[int, ...]:
  """Returns the shape of a pool; `num_layers` for one stage's."""
  layers = config.num_layers if num_layers is None else num_layers
  heads = (config.num_kv_heads, config.head_dim)
  return (layers, num_pages, 2, page_tokens, *heads)


def pool_sharding(config: ModelConfig, mesh: Mesh) -> NamedSharding:
  """KV heads are split over the mesh's 'kv' axis, copied over 'group'."""
  shape = pool_shape(config, 1, 1)
  return sharding.named_sharding(mesh, 'LP2CKH', shape)


def block_sharding(config: ModelConfig, mesh: Mesh) -> NamedSharding:
  """The sharding of gathered blocks [L, 2, S, K, H]."""
  shape = (1, 2, 1, config.num_kv_heads, config.head_dim)
  return sharding.named_sharding(mesh, 'L2SKH', shape)


def init_pool(
  config: ModelConfig,
  num_pages: int,
  page_tokens: int,
  dtype: jax.typing.DTypeLike = jnp.float32,
  mesh: Mesh | None = None,
  num_layers: int | None = None,
) -> jax.Array:
  """Returns a pool of zeros (masked keys must be finite)."""
  if num_pages < 2:
    raise ValueError(f'init_pool: {num_pages=} must be >= 2, page 0 is scratch')
  if page_tokens < 1:
    raise ValueError(f'init_pool: {page_tokens=} must be >= 1')
  shape = pool_shape(config, num_pages, page_tokens, num_layers)
  placed = pool_sharding(config, mesh) if mesh else None
  return jnp.zeros(shape, dtype, device=placed)


@functools.partial(jax.jit, static_argnames='num_layers')
def gather_pages(
  kv_LP2CKH: jax.Array,
  pages_n: jax.Array | np.ndarray,
  start_layer: jax.Array | np.int32 | int,
  num_layers: int,
) -> jax.Array:
  """Copies pages of layers from `start_layer` on out: [L, 2, S, K, H].

  Compiles once a number of pages and of layers: which ones is traced.
  """
  layers_L1 = (start_layer + jnp.arange(num_layers))[:, None]
  pages_Ln2CKH = kv_LP2CKH[layers_L1, pages_n[None]]
  L, n, _, C, K, H = pages_Ln2CKH.shape
  return jnp.swapaxes(pages_Ln2CKH, 1, 2).reshape(L, 2, n * C, K, H)


@functools.partial(jax.jit, donate_argnames='kv_LP2CKH')
def scatter_pages(
  kv_LP2CKH: jax.Array,
  pages_n: jax.Array | np.ndarray,
  block_L2SKH: jax.Array,
  start_layer: jax.Array | np.int32 | int = 0,
) -> tuple[jax.Array, jax.Array]:
  """Writes a block into pages, in place, page by page.

  Returns:
    The pool, and a scalar that is ready when the copy is: the pool itself is
    soon donated to a next step and cannot be waited for.
  """
  L, _, S, K, H = block_L2SKH.shape
  n, C = len(pages_n), kv_LP2CKH.shape[3]
  assert S == n * C, f'{S} tokens do not fill {n} pages of {C}'
  block_L2nCKH = block_L2SKH.reshape(L, 2, n, C, K, H)

  def write(i, kv_LP2CKH):
    page_L21CKH = jax.lax.dynamic_slice_in_dim(block_L2nCKH, i, 1, axis=2)
    page_L12CKH = jnp.swapaxes(page_L21CKH, 1, 2)
    at = (start_layer, pages_n[i], 0, 0, 0, 0)
    return jax.lax.dynamic_update_slice(
      kv_LP2CKH, page_L12CKH.astype(kv_LP2CKH.dtype), at
    )

  return jax.lax.fori_loop(0, n, write, kv_LP2CKH), pages_n[0]

# SPDX-License-Identifier: Apache-2.0
"""What decode steps on a CPU do in C++ (native/*.cc), by way of XLA's FFI.

Attention reads pages where they lie. XLA's products take whole arrays only, so
that the portable path copies a step's pages next to each other first.

B batch row, K KV head, G query heads a KV head, H head dim, L layer, P page,
C token in a page.
"""

import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.model.kernels.native.build import is_there

DTYPES = ('float32', 'bfloat16', 'int8', 'float8_e4m3fn')  # of KVCache
WEIGHT_DTYPES = ('float32', 'bfloat16', 'int8')
MOST_ROWS = 32  # of a product; with more, XLA's is as fast (LOG.md)


def attend(
  q_BKGH: jax.Array,
  kv_LP2CKH: jax.Array,
  layer: jax.Array,
  page_table_BP: jax.Array,
  position_B: jax.Array,
  stop_B: jax.Array,
  window: int | None,
) -> jax.Array:
  """Returns [B, K, G, H] as `decode_attention.attend` does.

  Computes in float32 whatever the dtypes are.

  Raises:
    RuntimeError: it can't be compiled here.
  """
  _check()
  out = jax.ShapeDtypeStruct(q_BKGH.shape, jnp.float32)
  o_BKGH = jax.ffi.ffi_call('mooncake_attend', out)(
    q_BKGH.astype(jnp.float32),
    kv_LP2CKH,
    layer.astype(jnp.int32),
    page_table_BP,
    position_B,
    stop_B,
    window=np.int64(window or 0),
  )
  return o_BKGH.astype(q_BKGH.dtype)


def product(
  x_BI: jax.Array, weights: jax.Array, layer: jax.Array, num_outputs: int
) -> jax.Array:
  """Returns float32 [B, O], of x float32 and a weight of I * O elements.

  Args:
    weights: of one layer, or a stack of them.
    layer: which one of the stack.

  Raises:
    RuntimeError: it can't be compiled here.
  """
  _check()
  out = jax.ShapeDtypeStruct((len(x_BI), num_outputs), jnp.float32)
  call = jax.ffi.ffi_call('mooncake_product', out)
  return call(x_BI, weights, layer.astype(jnp.int32))


def _check() -> None:
  if not is_there():
    raise RuntimeError('no C++ kernels for CPUs; see the log')

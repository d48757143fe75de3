# SPDX-License-Identifier: Apache-2.0
"""Attention over paged KVCache, block by block: the portable path.

A loop over blocks of keys with the running maximum and sum of a softmax
(FlashAttention's recurrence). The loop ends at the longest row, so the cost
follows real lengths, not the size of the page table. Each device runs its
own heads under `shard_map`, as an accelerator kernel would.

B batch, T query token, S key token, L layer, K KV head, G query heads a KV
head, H head dim, P page, C token in a page. Row b's query t stands at
position start_B[b] + t and sees the keys at positions up to its own.
"""

import functools

import jax
from jax import numpy as jnp

from mooncake_jax.model import decode_attention
from mooncake_jax.model import sharding
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.kernels import cpu
from mooncake_jax.model.kernels import gathered
from mooncake_jax.model.kernels import gpu
from mooncake_jax.model.kernels import tpu
from mooncake_jax.model.kernels.softmax import exact
from mooncake_jax.model.kernels.softmax import MASKED

BLOCK_TOKENS = 256  # keys
QUERY_TOKENS = 256  # the later queries of a long chunk see more keys


def attend(
  q_BTKGH: jax.Array,
  kv_LP2CKH: jax.Array,
  layer: int | jax.Array,
  page_table_BP: jax.Array,
  start_B: jax.Array,
  stop_B: jax.Array,
  window: int | None = None,
  kernel: AttentionKernel = 'jnp',
) -> jax.Array:
  """Returns the attention output [B, T, K, G, H] of one layer.

  Args:
    page_table_BP: pages in token order; entries past the stop are not used.
    stop_B: keys of row b lie at [0, stop_B[b]).
    window: a query sees so many keys, its own included; None is all.
    kernel: 'jnp' runs anywhere; the others on what they are named after.
  """
  args = (q_BTKGH, kv_LP2CKH, jnp.asarray(layer))
  args += (page_table_BP, start_B, stop_B)
  local = functools.partial(_KERNELS[kernel], window=window)
  mesh = jax.typeof(q_BTKGH).sharding.mesh
  if mesh.empty:
    return local(*args)
  q_spec = sharding.spec(mesh, 'BTKGH', q_BTKGH.shape)
  kv_spec = sharding.spec(mesh, 'LP2CKH', kv_LP2CKH.shape)
  whole = jax.sharding.PartitionSpec()
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(q_spec, kv_spec, whole, whole, whole, whole),
    out_specs=q_spec,
    axis_names=set(sharding.MESH_AXES),
    check_vma=kernel == 'jnp',  # the others don't say what they vary over
  )(*args)


def _attend(q_BTKGH, kv_LP2CKH, layer, table_BP, start_B, stop_B, window):
  """The heads of one device; of a chunk, a block of queries at a time."""
  B, T = q_BTKGH.shape[:2]
  if T == 1:
    rest = (kv_LP2CKH, layer, table_BP, start_B, stop_B, window)
    return decode_attention.attend(q_BTKGH[:, 0], *rest)[:, None]
  read = functools.partial(decode_attention.read, kv_LP2CKH, layer)
  rest = (read, kv_LP2CKH.shape[3], table_BP, start_B, stop_B, window)
  n, odd = divmod(T, QUERY_TOKENS)
  if n < 2 or odd:
    return _queries(0, q_BTKGH, *rest)
  blocks = q_BTKGH.reshape(B, n, QUERY_TOKENS, *q_BTKGH.shape[2:])
  out = jax.lax.map(
    lambda block: _queries(block[0], block[1], *rest),
    (jnp.arange(n), jnp.swapaxes(blocks, 0, 1)),
  )
  return jnp.swapaxes(out, 0, 1).reshape(q_BTKGH.shape)


def _queries(i, q_BTKGH, read, page_tokens, table_BP, start_B, stop_B, window):
  """Block `i` of the queries; those that are all padding see nothing."""
  T, H = q_BTKGH.shape[1], q_BTKGH.shape[4]
  first_B = start_B + i * T
  last_B = jnp.where(first_B < stop_B, jnp.minimum(first_B + T, stop_B), 0)
  q_BKGTH = jnp.transpose(q_BTKGH * H**-0.5, (0, 2, 3, 1, 4))
  o_BKGTH = _loop(q_BKGTH, read, page_tokens, table_BP, first_B, last_B, window)
  return jnp.transpose(o_BKGTH.astype(q_BTKGH.dtype), (0, 3, 1, 2, 4))


def _cpu(q_BTKGH, kv_LP2CKH, layer, table_BP, start_B, stop_B, window):
  """C++ for a step's queries; a chunk reads little for what it computes."""
  rest = (kv_LP2CKH, layer, table_BP, start_B, stop_B, window)
  if q_BTKGH.shape[1] > 1 or kv_LP2CKH.dtype not in cpu.DTYPES:
    return _attend(q_BTKGH, *rest)
  return cpu.attend(q_BTKGH[:, 0], *rest)[:, None]


def _pallas(*args, window):
  """The kernel of the platform that is compiled for."""
  by = functools.partial
  return jax.lax.platform_dependent(
    *args,
    cuda=by(gpu.attend, window=window),
    tpu=by(tpu.attend, window=window),
    default=by(tpu.attend, window=window, interpret=True),
  )


_KERNELS = {
  'jnp': _attend,
  'cpu': _cpu,
  'pallas': _pallas,
  'cudnn': gathered.cudnn,
  'tpu_ragged': gathered.tpu_ragged,
}


def _loop(q_BKGTH, read, page_tokens, table_BP, start_B, stop_B, window):
  """Softmax attention in float32 [B, K, G, T, H], over blocks of keys."""
  T = q_BKGTH.shape[3]
  n = max(1, BLOCK_TOKENS // page_tokens)
  S = n * page_tokens
  table_BP = jnp.pad(table_BP, ((0, 0), (0, -table_BP.shape[1] % n)))
  q_position_BT = start_B[:, None] + jnp.arange(T)[None]

  def step(i, carry):
    pages_Bn = jax.lax.dynamic_slice_in_dim(table_BP, i * n, n, axis=1)
    k_BKSH = _heads(read(pages_Bn, 0), q_BKGTH.shape)
    v_BKSH = _heads(read(pages_Bn, 1), q_BKGTH.shape)
    visible_BTS = _visible(q_position_BT, i * S + jnp.arange(S), window)
    return _accumulate(carry, q_BKGTH, k_BKSH, v_BKSH, visible_BTS)

  zero_BKGTH = (q_BKGTH * 0).astype(jnp.float32)
  zero_BKGT = zero_BKGTH[..., 0]
  carry = (zero_BKGT + MASKED, zero_BKGT, zero_BKGTH)
  first, last = _blocks(start_B, stop_B, S, window)
  _, l_BKGT, o_BKGTH = jax.lax.fori_loop(first, last, step, carry)
  # A batch without a valid row runs no block: 0 / 0 must not reach page 0.
  return o_BKGTH / jnp.maximum(l_BKGT, 1e-30)[..., None]


def _heads(a_BnCX, q_shape):
  """Splits K * H into the heads that the queries have: [B, K, S, H]."""
  B, n, C, _ = a_BnCX.shape
  K, H = q_shape[1], q_shape[4]
  return jnp.swapaxes(a_BnCX.reshape(B, n * C, K, H), 1, 2)


def _accumulate(carry, q_BKGTH, k_BKSH, v_BKSH, visible_BTS):
  """Adds a block of keys to the maximum, sum and weighted values so far."""
  m_BKGT, l_BKGT, o_BKGTH = carry
  s_BKGTS = jnp.einsum(
    'BKGTH,BKSH->BKGTS',
    q_BKGTH,
    k_BKSH.astype(q_BKGTH.dtype),
    precision=exact(q_BKGTH.dtype),
    preferred_element_type=jnp.float32,
  )
  s_BKGTS = jnp.where(visible_BTS[:, None, None], s_BKGTS, MASKED)
  top_BKGT = jnp.maximum(m_BKGT, s_BKGTS.max(axis=-1))
  p_BKGTS = jnp.exp(s_BKGTS - top_BKGT[..., None])
  keep_BKGT = jnp.exp(m_BKGT - top_BKGT)
  pv_BKGTH = jnp.einsum(
    'BKGTS,BKSH->BKGTH',
    p_BKGTS.astype(q_BKGTH.dtype),
    v_BKSH.astype(q_BKGTH.dtype),
    precision=exact(q_BKGTH.dtype),
    preferred_element_type=jnp.float32,
  )
  l_BKGT = l_BKGT * keep_BKGT + p_BKGTS.sum(axis=-1)
  return top_BKGT, l_BKGT, o_BKGTH * keep_BKGT[..., None] + pv_BKGTH


def _visible(q_position_BT, k_position_S, window):
  """[B, T, S]: for queries at 3 and 4 and a window of 3, keys 1-3 and 2-4."""
  q_BT1 = q_position_BT[:, :, None]
  k_11S = k_position_S[None, None]
  causal = k_11S <= q_BT1
  return causal if window is None else causal & (k_11S > q_BT1 - window)


def _blocks(start_B, stop_B, block_tokens, window):
  """Key blocks [first, last) that any row sees."""
  last = -(-jnp.max(stop_B) // block_tokens)
  if window is None:
    return 0, last
  oldest = jnp.min(jnp.where(stop_B > 0, start_B, jnp.max(stop_B)))
  return jnp.maximum(oldest - window + 1, 0) // block_tokens, last

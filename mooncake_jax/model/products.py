# SPDX-License-Identifier: Apache-2.0
"""Products of activations with weights: XLA's, or C++ for few rows on a CPU.

A step of few rows is bound by reading the weights, which XLA's own products
on a CPU do at about two thirds of the rate that there is (LOG.md). int8
weights are read as they are there; XLA makes floats of them first.

I input and O output axes of a weight.
"""

import math
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mooncake_jax.model import quantize
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.kernels import cpu


def product(
  x: jax.Array,
  weight: jax.Array | quantize.Quantized,
  summed: int = 1,
  kernel: AttentionKernel = 'jnp',
  out_sharding: NamedSharding | None = None,
  dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
  """Returns x [..., I...] times weight [I..., O...].

  Args:
    summed: how many axes I are.
    kernel: 'cpu' takes C++ where there are few rows and one device.
    dtype: of the result; None is x's.
  """
  dtype = dtype or x.dtype
  if kernel == 'cpu' and _is_few(x, weight, summed):
    return _few(x, weight, summed, dtype)
  return jnp.tensordot(
    x,
    quantize.dense_weight(weight),
    summed,
    preferred_element_type=dtype,
    out_sharding=out_sharding,
  )


def _is_few(x: jax.Array, weight: Any, summed: int) -> bool:
  values = weight.values if isinstance(weight, quantize.Quantized) else weight
  mesh = jax.typeof(x).sharding.mesh
  return (
    math.prod(x.shape[:-summed]) <= cpu.MOST_ROWS
    and values.dtype in cpu.WEIGHT_DTYPES
    and (mesh.empty or mesh.size == 1)
  )


def _few(x: jax.Array, weight: Any, summed: int, dtype) -> jax.Array:
  if isinstance(weight, quantize.Quantized):
    y = _few(x, weight.values, summed, jnp.float32)
    num = weight.scale.ndim - summed
    scale = weight.scale.reshape((1,) * (x.ndim - summed) + y.shape[-num:])
    return (y * scale).astype(dtype)
  mesh = jax.typeof(x).sharding.mesh
  shape = (*x.shape[:-summed], *weight.shape[summed:])

  def local(x, weight):
    rows = x.reshape(math.prod(x.shape[:-summed]), -1)
    num_outputs = math.prod(weight.shape[summed:])
    y = cpu.product(rows.astype(jnp.float32), weight, num_outputs)
    return y.reshape(shape).astype(dtype)

  if mesh.empty:
    return local(x, weight)
  whole = PartitionSpec()  # on the one device that there is
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(whole, whole),
    out_specs=whole,
    check_vma=False,  # the kernel does not say what it varies over
  )(x, weight)

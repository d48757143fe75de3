# SPDX-License-Identifier: Apache-2.0
"""Products of activations with weights: XLA's, or C++ for few rows on a CPU.

A step of few rows is bound by reading the weights, which XLA's own products
on a CPU do at about two thirds of the rate that there is (LOG.md). int8
weights are read as they are there; XLA makes floats of them first.

I input and O output axes of a weight.
"""

import functools
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mooncake_jax.model import quantize
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.kernels import cpu


class Stacked(NamedTuple):
  """One layer's weight where it lies, in a stack of all layers' [L, ...]."""

  weights: Any
  layer: jax.Array

  def taken(self) -> Any:
    """The weight by itself: a copy, unless XLA fuses it into its use."""
    return jax.tree.map(
      lambda a: jax.lax.dynamic_index_in_dim(a, self.layer, keepdims=False),
      self.weights,
    )


Weight = jax.Array | quantize.Quantized | Stacked


def product(
  x: jax.Array,
  weight: Weight,
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
    return _few(x, weight, summed).astype(dtype)
  plain = weight.taken() if isinstance(weight, Stacked) else weight
  return jnp.tensordot(
    x,
    quantize.dense_weight(plain),
    summed,
    preferred_element_type=dtype,
    out_sharding=out_sharding,
  )


def can_stay_stacked(num_rows: int, kernel: AttentionKernel) -> bool:
  """Whether a stack's weights are read where they lie."""
  return kernel == 'cpu' and num_rows <= cpu.MOST_ROWS


def _is_few(x: jax.Array, weight: Any, summed: int) -> bool:
  mesh = jax.typeof(x).sharding.mesh
  return (
    can_stay_stacked(math.prod(x.shape[:-summed]), 'cpu')
    and jax.tree.leaves(weight)[0].dtype in cpu.WEIGHT_DTYPES
    and (mesh.empty or mesh.size == 1)
  )


def _few(x: jax.Array, weight: Any, summed: int) -> jax.Array:
  """float32, whatever the weight is stored as."""
  weight, layer = weight if isinstance(weight, Stacked) else (weight, None)
  scale = None
  if isinstance(weight, quantize.Quantized):
    weight, scale = weight.values, weight.scale
    if layer is not None:
      scale = Stacked(scale, layer).taken()
  shape = weight.shape[summed:] if layer is None else weight.shape[1 + summed :]
  at = jnp.zeros((), jnp.int32) if layer is None else layer
  y = _on_device(x.reshape(-1, math.prod(x.shape[-summed:])), weight, at, shape)
  y = y.reshape(*x.shape[:-summed], *shape)
  if scale is None:
    return y
  return y * scale.reshape((1,) * (x.ndim - summed) + shape)


def _on_device(x_BI, weight, layer, shape) -> jax.Array:
  call = functools.partial(cpu.product, num_outputs=math.prod(shape))
  args = (x_BI.astype(jnp.float32), weight, layer)
  mesh = jax.typeof(x_BI).sharding.mesh
  if mesh.empty:
    return call(*args)
  whole = PartitionSpec()  # on the one device that there is
  return jax.shard_map(
    call,
    mesh=mesh,
    in_specs=(whole, whole, whole),
    out_specs=whole,
    check_vma=False,  # the kernel does not say what it varies over
  )(*args)

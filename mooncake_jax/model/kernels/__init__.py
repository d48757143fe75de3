# SPDX-License-Identifier: Apache-2.0
"""Attention kernels, each in the place of the portable path.

`gpu` and `tpu` are ours, in Pallas: 'pallas' is the one of the platform, or
either's interpreter on a CPU. `gathered` feeds JAX's: 'cudnn', 'tpu_ragged'.
`cpu` is ours in C++, for decode steps. On a CPU 'auto' is that where it can be
compiled; on a TPU it is 'pallas' where pages and heads fit its tiles, as its
compiler says; elsewhere it is the portable path, 'jnp'. On a GPU 'pallas' was
lowered and never run, so there it has to be asked for.
"""

from typing import Any
from typing import Literal

AttentionKernel = Literal['jnp', 'cpu', 'pallas', 'cudnn', 'tpu_ragged']
AttentionChoice = Literal['auto', 'jnp', 'cpu', 'pallas', 'cudnn', 'tpu_ragged']


def chosen(
  choice: AttentionChoice,
  device: Any,
  pages_shape: tuple[int, int, int],
  dtype: Any,
) -> AttentionKernel:
  """What 'auto' stands for on a device; the others as they are.

  Args:
    device: as JAX gives them.
    pages_shape: of one device's pages: tokens, KV heads, head dim.
    dtype: of KVCache.

  Raises:
    ValueError: 'cpu' where it can't be compiled, or for another platform.
  """
  platform = device.platform
  if choice == 'auto' and platform != 'cpu':
    is_fit = platform == 'tpu' and _fits(pages_shape, dtype)
    return 'pallas' if is_fit else 'jnp'
  if choice not in ('auto', 'cpu'):
    return choice
  from mooncake_jax.model.kernels.native import build

  is_there = platform == 'cpu' and build.is_there()
  if choice == 'cpu' and not is_there:
    raise ValueError(
      f'attention={choice!r} needs a CPU and a C++ compiler ({platform=})'
    )
  return 'cpu' if is_there else 'jnp'


def _fits(pages_shape: tuple[int, int, int], dtype: Any) -> bool:
  """Whether 'pallas' takes such pages; of narrower KVCache that is unknown."""
  from mooncake_jax.model.kernels import tpu

  page_tokens, num_heads, head_dim = pages_shape
  is_known = str(dtype) in ('float32', 'bfloat16')
  return is_known and tpu.fits(page_tokens, num_heads, head_dim, dtype.itemsize)

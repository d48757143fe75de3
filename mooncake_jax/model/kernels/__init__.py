# SPDX-License-Identifier: Apache-2.0
"""Attention kernels, each in the place of the portable path.

`gpu` and `tpu` are ours, in Pallas: 'pallas' is the one of the platform, or
either's interpreter on a CPU. `gathered` feeds JAX's: 'cudnn', 'tpu_ragged'.
`cpu` is ours in C++, for decode steps; 'auto' is that where it can be
compiled and the portable path elsewhere.
"""

from typing import Literal

AttentionKernel = Literal['jnp', 'cpu', 'pallas', 'cudnn', 'tpu_ragged']
AttentionChoice = Literal['auto', 'jnp', 'cpu', 'pallas', 'cudnn', 'tpu_ragged']


def chosen(choice: AttentionChoice, platform: str) -> AttentionKernel:
  """What 'auto' stands for on a platform; the others as they are.

  Raises:
    ValueError: 'cpu' where it can't be compiled, or for another platform.
  """
  if choice not in ('auto', 'cpu'):
    return choice
  from mooncake_jax.model.kernels.native import build

  is_there = platform == 'cpu' and build.is_there()
  if choice == 'cpu' and not is_there:
    raise ValueError(
      f'attention={choice!r} needs a CPU and a C++ compiler ({platform=})'
    )
  return 'cpu' if is_there else 'jnp'

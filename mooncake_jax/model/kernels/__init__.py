# SPDX-License-Identifier: Apache-2.0
"""Attention kernels of accelerators, each in the place of the portable path.

`gpu` and `tpu` are ours, in Pallas: 'pallas' is the one of the platform, or
either's interpreter on a CPU. `gathered` feeds JAX's: 'cudnn', 'tpu_ragged'.
"""

from typing import Literal

AttentionKernel = Literal['jnp', 'pallas', 'cudnn', 'tpu_ragged']

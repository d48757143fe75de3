# SPDX-License-Identifier: Apache-2.0
"""Costs from a data sheet, for hardware nobody measured yet.

A kernel takes as long as the slower of its arithmetic and its reads, each at
the share of the peak that real systems reach. For orientation, FAST'25 Eq. 1
counts a prompt's work as flops(n) = l * (a * n^2 * d + b * n * d^2) with
a = 4, b = 22 for LLaMA3-70B (l = 80 layers, d = 8192), and its KVCache as
2 * d / gqa * s bytes a layer and token (320 KB a token with gqa = 8, s = 2).
Differs: the work here is `ModelConfig.prefill_flops`, which counts every
matrix of the config as it is and only the causal half of attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_jax.blocks.accounting import kv_bytes
from mooncake_jax.costs.model import check_positive
from mooncake_jax.costs.model import Chunk
from mooncake_jax.costs.model import Links
from mooncake_jax.model_config import ModelConfig


@dataclass(frozen=True)
class RooflineCost(Links):
  """Costs of one instance of `num_devices` alike, work evenly split.

  Attributes:
    config: of the model served.
    peak_flops_per_s, hbm_bytes_per_s: of one device, in `dtype_bytes`.
    mfu, mbu: shares of these two that are reached. Published systems lie
      near 0.47 and 0.8 on A100 and H200; `costs.fit_roofline` finds them.
    attention_mfu: of attention in prefill; None is mfu.
    dtype_bytes: of a weight and of a KVCache number.
    prefill_overhead_s, decode_overhead_s: what a chunk or a step costs
      besides (launches, all-reduces, the host).
    decode_row_s: what one more row costs besides its KVCache (sampling).
    The lines of `Links`, of the whole instance.

  Raises:
    ValueError: a negative number, a bandwidth of 0, mfu or mbu above 1.
  """

  config: ModelConfig
  peak_flops_per_s: float
  hbm_bytes_per_s: float
  num_devices: int = 1
  mfu: float = 0.47
  mbu: float = 0.8
  attention_mfu: float | None = None
  dtype_bytes: int = 2
  prefill_overhead_s: float = 0.0
  decode_overhead_s: float = 0.0
  decode_row_s: float = 0.0

  def __post_init__(self):
    for name, value in vars(self).items():
      if name == 'config' or value is None:
        continue
      zero = name.endswith(('_overhead_s', '_row_s', '_latency_s'))
      check_positive(f'RooflineCost.{name}', value, zero)
      if name in ('mfu', 'mbu', 'attention_mfu') and value > 1:
        raise ValueError(f'RooflineCost.{name}={value!r} must be <= 1')

  def prefill_s(self, chunk_tokens: int, prefix_tokens: int) -> float:
    return self.pass_s([Chunk(chunk_tokens, prefix_tokens)])

  def pass_s(self, chunks: Sequence[Chunk]) -> float:
    """The weights are read once, and each prompt's KVCache."""
    flops = sum(self._chunk_flops(*chunk) for chunk in chunks)
    return self.prefill_overhead_s + self._kernel_s(
      flops, sum(map(sum, chunks))
    )

  def decode_step_s(self, batch_size: int, context_tokens: int) -> float:
    config = self.config
    weights = config.num_layers * config.num_layer_matmul_params
    weights += config.vocab_size * config.model_dim
    heads = config.num_layers * config.num_heads * config.head_dim
    flops = 2 * batch_size * weights + 4 * heads * context_tokens
    return (
      self.decode_overhead_s
      + self.decode_row_s * batch_size
      + self._kernel_s(flops, context_tokens)
    )

  def _chunk_flops(self, tokens: int, prefix_tokens: int) -> float:
    """As if all were at mfu."""
    span = prefix_tokens, prefix_tokens + tokens
    flops = self.config.prefill_flops(*span)
    if self.attention_mfu is not None:
      attention = self.config.attention_flops(*span)
      flops += attention * (self.mfu / self.attention_mfu - 1)
    return flops

  def _kernel_s(self, flops: float, kv_tokens: int) -> float:
    """The slower of `flops` and reading all weights and `kv_tokens`."""
    num_bytes = self.config.num_params * self.dtype_bytes
    num_bytes += kv_bytes(self.config, kv_tokens, self.dtype_bytes)
    compute_s = flops / (self.peak_flops_per_s * self.mfu)
    read_s = num_bytes / (self.hbm_bytes_per_s * self.mbu)
    return max(compute_s, read_s) / self.num_devices

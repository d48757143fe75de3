# SPDX-License-Identifier: Apache-2.0
"""Sizes and options of a dense decoder: Llama, Qwen2, Qwen3, Mistral.

Read from and written to the `config.json` of a Hugging Face model. What is
not computed exactly here is refused, with the file, field and value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from typing import get_args
from typing import Literal

from mooncake_jax import hf_config

Family = Literal['llama', 'qwen2', 'qwen3', 'mistral']


@dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are stretched beyond the trained length.

  Attributes:
    kind: 'linear' divides every frequency by `factor`; 'llama3' only those
      whose wavelength is long against `original_max_tokens`.
    low_freq_factor, high_freq_factor, original_max_tokens: 'llama3' only.
  """

  kind: Literal['linear', 'llama3']
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_tokens: int = 8192


@dataclass(frozen=True)
class ModelConfig:
  """A dense decoder. Hashable: a static argument of every step function.

  Attributes:
    num_heads: query heads; `num_kv_heads` divides it.
    max_tokens: longest sequence, prompt and output together.
    qkv_bias: q, k and v projections have a bias (Qwen2).
    qk_norm: q and k are RMS-normalised per head before RoPE (Qwen3).
    sliding_window: every layer sees the last so many tokens; None is all.
  """

  family: Family
  vocab_size: int
  model_dim: int
  mlp_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_tokens: int
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  bos_token_id: int | None = None
  eos_token_ids: tuple[int, ...] = ()
  sliding_window: int | None = None

  def __post_init__(self):
    if self.family not in get_args(Family):
      raise ValueError(
        f'ModelConfig.family={self.family!r} must be one of {get_args(Family)}'
      )
    for name in (
      'vocab_size model_dim mlp_dim num_layers num_heads num_kv_heads'
      ' head_dim max_tokens'
    ).split():
      value = getattr(self, name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(f'ModelConfig.{name}={value!r} must be an int >= 1')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'ModelConfig.num_heads={self.num_heads} must be a multiple of '
        f'num_kv_heads={self.num_kv_heads}'
      )
    if self.head_dim % 2:
      raise ValueError(f'ModelConfig.head_dim={self.head_dim} must be even')
    if self.sliding_window is not None and self.sliding_window < 1:
      raise ValueError(
        f'ModelConfig.sliding_window={self.sliding_window} must be >= 1'
      )

  @classmethod
  def from_hf(cls, source: str | Path | Mapping[str, Any]) -> 'ModelConfig':
    """Reads a `config.json`, a folder that has one, or its content.

    Raises:
      ValueError: naming file, field and value of what is missing, wrong or
        not computed here (other families, other RoPE kinds, MLP bias, a
        sliding window on some layers only).
    """
    reader = hf_config.Reader.open(source)
    fields = hf_config.read_fields(reader)
    scaling = hf_config.read_rope_scaling(reader)
    if scaling is not None:
      fields['rope_scaling'] = RopeScaling(**scaling)
    try:
      return cls(**fields)
    except ValueError as error:
      raise ValueError(f'{reader.name}: {error}') from error

  def to_hf(self) -> dict[str, Any]:
    """Returns a `config.json` that `from_hf` and other tools read."""
    return hf_config.write_fields(self)

  @property
  def num_groups(self) -> int:
    """Query heads that share a KV head (G)."""
    return self.num_heads // self.num_kv_heads

  @cached_property
  def num_layer_matmul_params(self) -> int:
    """Weights of one layer's matrix products."""
    heads = 2 * self.num_heads + 2 * self.num_kv_heads
    return self.model_dim * (heads * self.head_dim + 3 * self.mlp_dim)

  @cached_property
  def num_params(self) -> int:
    """All weights; tied embeddings count once."""
    layer = self.num_layer_matmul_params + 2 * self.model_dim
    if self.qkv_bias:
      layer += (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    if self.qk_norm:
      layer += 2 * self.head_dim
    tables = 1 if self.tie_embeddings else 2
    return (
      self.num_layers * layer
      + tables * self.vocab_size * self.model_dim
      + self.model_dim
    )

  def prefill_flops(self, start: int, stop: int) -> int:
    """Floating point operations to prefill tokens [start, stop).

    Counts a multiply-add as two: the layers' products for each token, the
    attention to the tokens it sees, and one unembedding.
    """
    tokens = stop - start
    matmul = 2 * tokens * self.num_layers * self.num_layer_matmul_params
    unembedding = 2 * self.vocab_size * self.model_dim
    return matmul + self.attention_flops(start, stop) + unembedding

  def attention_flops(self, start: int, stop: int) -> int:
    """Of these, what tokens [start, stop) take to attend."""
    keys = _num_visible(stop, self.sliding_window) - _num_visible(
      start, self.sliding_window
    )
    heads = self.num_heads * self.head_dim
    return 4 * self.num_layers * heads * keys


def _num_visible(tokens: int, window: int | None) -> int:
  """Sum over the first `tokens` tokens of the keys each one sees.

  For 5 tokens: 1+2+3+4+5 = 15; with a window of 3, 1+2+3+3+3 = 12.
  """
  if window is None or tokens <= window:
    return tokens * (tokens + 1) // 2
  return window * (window + 1) // 2 + (tokens - window) * window

# SPDX-License-Identifier: Apache-2.0
"""Models by their shapes, and which of them a device can hold."""

from dataclasses import dataclass

import jax

from mooncake_jax.cluster_spec import KVDtype
from mooncake_jax.model_config import ModelConfig
from scripts.benches.model import CONFIG as SMOLLM2

LLAMA_8B = ModelConfig(
  family='llama',
  vocab_size=128256,
  model_dim=4096,
  mlp_dim=14336,
  num_layers=32,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  max_tokens=131072,
  rope_theta=500000.0,
  norm_eps=1e-5,
)
LLAMA_1B = ModelConfig(
  family='llama',
  vocab_size=128256,
  model_dim=2048,
  mlp_dim=8192,
  num_layers=16,
  num_heads=32,
  num_kv_heads=8,
  head_dim=64,
  max_tokens=131072,
  rope_theta=500000.0,
  norm_eps=1e-5,
  tie_embeddings=True,
)
TINY = ModelConfig(
  family='llama',
  vocab_size=512,
  model_dim=64,
  mlp_dim=128,
  num_layers=2,
  num_heads=6,
  num_kv_heads=3,
  head_dim=64,
  max_tokens=1024,
)


@dataclass(frozen=True)
class Sizes:
  """What is measured on: (name, shape) of models, and how much.

  Attributes:
    small: a model for tests of the engine and for serving.
    gemm: edge of square matrix products.
    bytes: moved by a copy, and by the store.
    chunk, prefix, batch, context: tokens and rows of steps.
    prompts: requests served.
  """

  models: tuple[tuple[str, ModelConfig], ...]
  small: ModelConfig
  dtype: KVDtype
  gemm: int
  bytes: int
  chunk: int
  prefix: int
  batch: tuple[int, ...]
  context: int
  prompts: int


def sizes(is_small: bool) -> Sizes:
  """Full sizes for an accelerator; small ones show that all parts run."""
  if is_small:
    models = (('tiny', TINY),)
    return Sizes(models, TINY, 'float32', 256, 1 << 20, 64, 64, (2,), 128, 6)
  large = ('llama_8b', LLAMA_8B) if _memory_bytes() > 60e9 else None
  large = large or ('llama_1b', LLAMA_1B)
  models = (large, ('smollm2', SMOLLM2))
  batch = (1, 8, 32)
  return Sizes(
    models, SMOLLM2, 'bfloat16', 8192, 1 << 30, 2048, 2048, batch, 2048, 32
  )


def _memory_bytes() -> int:
  stats = jax.devices()[0].memory_stats() or {}
  return stats.get('bytes_limit', 0)

# SPDX-License-Identifier: Apache-2.0
"""What a block's KVCache depends on beside its tokens."""

import hashlib
import json

from mooncake_jax.model_config import ModelConfig


def kv_identity(config: ModelConfig, weights: str, kv_dtype: str) -> str:
  """Seed of the block key chain of one model in one KVCache dtype.

  Args:
    config: all of it counts, since RoPE and norms change the KVCache.
    weights: names the weights, such as a checkpoint's fingerprint or
      'random-0' for a seeded initialisation.
    kv_dtype: 'float32', 'bfloat16' ...
  """
  said = json.dumps([config.to_hf(), weights], sort_keys=True)
  return f'{hashlib.sha256(said.encode()).hexdigest()[:16]}/{kv_dtype}'

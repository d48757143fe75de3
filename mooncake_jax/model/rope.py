# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: pairs (h, h + H/2) turn by position.

B batch, T query token, H head dim.
"""

import math

import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.model_config import ModelConfig
from mooncake_jax.model_config import RopeScaling


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
  """Returns float32 [H/2]: radians a token, after scaling."""
  exponent = np.arange(0, config.head_dim, 2, dtype=np.float32)
  exponent /= np.float32(config.head_dim)
  inverse = np.float32(1) / np.float32(config.rope_theta) ** exponent
  match config.rope_scaling:
    case None:
      return inverse
    case RopeScaling(kind='linear', factor=factor):
      return inverse / np.float32(factor)
    case RopeScaling() as scaling:
      return _llama3(inverse, scaling)


def _llama3(inverse: np.ndarray, scaling: RopeScaling) -> np.ndarray:
  """Llama 3.1: long wavelengths are stretched, short ones kept.

  Between the two, linearly in the turns made within the trained length.
  """
  wavelength = 2 * math.pi / inverse
  turns = scaling.original_max_tokens / wavelength
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  kept = np.clip((turns - low) / (high - low), 0, 1)
  scaled = (1 - kept) * inverse / scaling.factor + kept * inverse
  return scaled.astype(np.float32)


def angles(
  config: ModelConfig, positions_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns float32 cosines and sines [B, T, H/2] of positions."""
  inverse = jnp.asarray(inverse_frequencies(config))
  radians = positions_BT[:, :, None].astype(jnp.float32) * inverse[None, None]
  return jnp.cos(radians), jnp.sin(radians)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Turns x [B, T, ..., H] by the angles of its positions."""
  heads = tuple(range(2, x.ndim - 1))
  cos, sin = (jnp.expand_dims(a, heads) for a in angles)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)

# SPDX-License-Identifier: Apache-2.0
"""GGUF files: configuration and dequantised parameters."""

from pathlib import Path

import jax
from jax.sharding import Mesh
import numpy as np

from mooncake_jax.model.checkpoints import gguf_config
from mooncake_jax.model.checkpoints import source
from mooncake_jax.model.checkpoints.gguf_file import GGUFFile
from mooncake_jax.model.params import Params
from mooncake_jax.model_config import ModelConfig


def load_gguf(
  path: str | Path | GGUFFile,
  mesh: Mesh | None = None,
  dtype: jax.typing.DTypeLike = np.float32,
) -> tuple[ModelConfig, Params]:
  """Reads a GGUF file of a Llama, Mistral, Qwen2 or Qwen3 model.

  Args:
    path: the file, or one that is open (opening costs seconds).
    mesh: an instance's mesh; None puts all on the default device.
    dtype: of every parameter; quantised blocks are decoded in float32 first.

  Returns:
    The configuration and the tree of `params.py`, layers as a tuple.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is damaged, or holds what is not served here; names
      the file, the field or tensor, and the value.
  """
  file = path if isinstance(path, GGUFFile) else GGUFFile(path)
  try:
    config = ModelConfig.from_hf(gguf_config.hf_config(file))
  except ValueError as error:
    raise ValueError(f'{file.path}: {error}') from error
  return config, source.load(file, config, mesh, dtype)

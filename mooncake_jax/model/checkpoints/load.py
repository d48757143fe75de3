# SPDX-License-Identifier: Apache-2.0
"""A model from wherever it lies: the format is told by what is there."""

from pathlib import Path

import jax
from jax.sharding import Mesh
import numpy as np

from mooncake_jax.model.checkpoints import gguf
from mooncake_jax.model.checkpoints import orbax
from mooncake_jax.model.checkpoints import safetensors
from mooncake_jax.model.params import Params
from mooncake_jax.model_config import ModelConfig


def load_model(
  path: str | Path,
  mesh: Mesh | None = None,
  dtype: jax.typing.DTypeLike = np.float32,
) -> tuple[ModelConfig, Params]:
  """Reads a Hugging Face folder, an orbax checkpoint or a GGUF file.

  Args:
    path: a folder of config.json and model*.safetensors, a folder that
      `save_orbax` wrote, or a .gguf file.
    mesh: an instance's mesh; None puts all on the default device.
    dtype: of every parameter, whatever the saved one is.

  Returns:
    The configuration and the tree of `params.py`, layers as a tuple.

  Raises:
    FileNotFoundError: nothing of the kind is there; says what was looked for.
    ValueError: as the reader of the format.
  """
  root = Path(path)
  if root.is_file() and root.suffix == '.gguf':
    return gguf.load_gguf(root, mesh, dtype)
  load = _folder_reader(root)
  config = ModelConfig.from_hf(root)
  return config, load(root, config, mesh, dtype)


def _folder_reader(root: Path):
  if (root / safetensors.WEIGHTS).is_file():
    return safetensors.load_safetensors
  if (root / safetensors.INDEX).is_file():
    return safetensors.load_safetensors
  if (root / orbax.PARAMS).is_dir():
    return orbax.load_orbax
  looked_for = [safetensors.WEIGHTS, safetensors.INDEX, f'{orbax.PARAMS}/']
  raise FileNotFoundError(
    f'{root}: no model: neither a .gguf file nor a folder with one of '
    f'{looked_for}'
  )

# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: config.json and model*.safetensors."""

from collections.abc import Iterator
import json
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np
from safetensors import safe_open
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mooncake_jax.model.checkpoints import names
from mooncake_jax.model.checkpoints import source
from mooncake_jax.model.params import Params
from mooncake_jax.model_config import ModelConfig

WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'


class SafetensorsFolder:
  """The tensors of a folder, memory-mapped, in one file or in shards.

  Attributes:
    path: the folder, or its only weights file.

  Raises:
    FileNotFoundError: no weights, or a shard that the index names is missing.
    ValueError: a damaged file; names it.
  """

  def __init__(self, folder: str | Path):
    root = Path(folder)
    weights = _weights(root)
    self.path = str(weights[0] if len(weights) == 1 else root)
    self._slices: dict[str, Any] = {}
    for path in weights:
      file = _open(path)
      for name in file.keys():
        self._slices[name] = file.get_slice(name)

  def names(self) -> Iterator[str]:
    """All tensors there are."""
    return iter(self._slices)

  def shape(self, name: str) -> tuple[int, ...]:
    """Shape of one of them."""
    return tuple(self._slices[name].get_shape())

  def read(self, name: str, index: source.Index) -> np.ndarray:
    """`tensor[index]` alone, in the file's dtype."""
    try:
      return self._slices[name][index]
    except (SafetensorError, TypeError) as error:
      kind = self._slices[name].get_dtype()
      raise ValueError(
        f'{self.path}: tensor {name!r} of dtype {kind!r}: {error}'
      ) from error


def load_safetensors(
  folder: str | Path,
  config: ModelConfig | None = None,
  mesh: Mesh | None = None,
  dtype: jax.typing.DTypeLike = np.float32,
) -> Params:
  """Reads a Hugging Face folder; each device reads its slice only.

  Args:
    folder: with model.safetensors, or shards and their index.
    config: None takes the folder's config.json.
    mesh: an instance's mesh; None puts all on the default device.
    dtype: of every parameter, whatever the file's is.

  Returns:
    The tree of `params.py`, layers as a tuple.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: a file is damaged, or a tensor is missing, of another shape
      or of no use to this config; names the file, tensor and value.
  """
  if config is None:
    config = ModelConfig.from_hf(folder)
  return source.load(SafetensorsFolder(folder), config, mesh, dtype)


def save_safetensors(
  folder: str | Path, params: Params, config: ModelConfig
) -> None:
  """Writes config.json and model.safetensors under Hugging Face names.

  The dtype is the parameters'. Whole parameters are gathered on the host.
  An existing checkpoint in `folder` is replaced.
  """
  root = Path(folder)
  root.mkdir(parents=True, exist_ok=True)
  stored = names.tensors(params, config)
  tensors = {tensor.name: value for tensor, value in stored}
  partial = root / f'.{WEIGHTS}'
  save_file(tensors, partial, metadata={'format': 'pt'})
  partial.chmod(0o644)  # the library leaves 0600
  partial.replace(root / WEIGHTS)
  dtype = str(next(iter(tensors.values())).dtype)
  fields = {**config.to_hf(), 'torch_dtype': dtype}
  text = json.dumps(fields, indent=2) + '\n'
  (root / 'config.json').write_text(text, encoding='utf-8')


def _weights(root: Path) -> list[Path]:
  index = root / INDEX
  if index.is_file():
    shards = sorted(set(_weight_map(index).values()))
    paths = [root / shard for shard in shards]
  else:
    paths = [root / WEIGHTS]
  for path in paths:
    if not path.is_file():
      raise FileNotFoundError(f'{path}: no such weights file')
  return paths


def _weight_map(index: Path) -> dict[str, str]:
  try:
    return json.loads(index.read_text(encoding='utf-8'))['weight_map']
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{index}: no weight_map: {error!r}') from error


def _open(path: Path) -> Any:
  try:
    return safe_open(path, framework='np')
  except SafetensorError as error:
    raise ValueError(
      f'{path}: damaged or truncated safetensors: {error}'
    ) from error

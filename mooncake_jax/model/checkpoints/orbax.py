# SPDX-License-Identifier: Apache-2.0
"""Orbax checkpoints: parameters saved from one mesh, restored onto another.

A checkpoint is a folder of config.json and `params/`, which is orbax's own.
Layers are saved one by one, whatever their layout in memory.
"""

import json
from pathlib import Path

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from mooncake_jax.model import params as params_lib
from mooncake_jax.model.checkpoints import source
from mooncake_jax.model.params import Params
from mooncake_jax.model_config import ModelConfig

PARAMS = 'params'


def save_orbax(path: str | Path, params: Params, config: ModelConfig) -> None:
  """Writes the parameters, from whatever mesh they are on, and the config.

  An existing checkpoint at `path` is replaced.
  """
  root = Path(path).resolve()
  root.mkdir(parents=True, exist_ok=True)
  tree = params_lib.unstack_layers(params)
  keys = params_lib.declarations(config)  # no copy of tied embeddings
  saved = {key: tree[key] for key in keys}
  ocp.save(str(root / PARAMS), saved, overwrite=True)
  text = json.dumps(config.to_hf(), indent=2) + '\n'
  (root / 'config.json').write_text(text, encoding='utf-8')


def load_orbax(
  path: str | Path,
  config: ModelConfig | None = None,
  mesh: Mesh | None = None,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> Params:
  """Restores parameters onto a mesh; each device reads its slice only.

  Args:
    path: what `save_orbax` wrote.
    config: None takes the checkpoint's config.json.
    mesh: an instance's mesh; None puts all on the default device.
    dtype: of every parameter, whatever the saved one is.

  Returns:
    The tree of `params.py`, layers as a tuple.

  Raises:
    FileNotFoundError: there is no checkpoint.
    ValueError: the config asks for other parameters than were saved, or a
      file is damaged; names the folder, the parameter and the shapes.
  """
  root = Path(path).resolve()
  if not (root / PARAMS).is_dir():
    raise FileNotFoundError(f'{root / PARAMS}: no such orbax checkpoint')
  if config is None:
    config = ModelConfig.from_hf(root)
  abstract = source.abstract_params(config, mesh, dtype)
  _check(root, abstract)
  try:
    return ocp.load(str(root / PARAMS), abstract)
  except Exception as error:  # tensorstore raises bare Exception
    reason = str(error).split('. ')[0].split('\n')[0]
    raise ValueError(f'{root}: damaged orbax checkpoint: {reason}') from error


def _check(root: Path, abstract: Params) -> None:
  """Compares with what was saved before reading any of it."""
  saved = ocp.metadata(str(root / PARAMS)).metadata
  found = _shapes(saved)
  wanted = _shapes(abstract)
  for name in sorted(found.keys() | wanted.keys()):
    if found.get(name) != wanted.get(name):
      raise ValueError(
        f'{root}: parameter {name!r} has shape={found.get(name)}, the config '
        f'asks for {wanted.get(name)}'
      )


def _shapes(tree: Params) -> dict[str, tuple[int, ...]]:
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {_name(path): tuple(leaf.shape) for path, leaf in leaves}


def _name(path: tuple) -> str:
  """'layers.0.wq'; a tuple's index and a dict's key read the same."""
  return jax.tree_util.keystr(path, simple=True, separator='.')

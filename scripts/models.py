# SPDX-License-Identifier: Apache-2.0
"""Which model a run serves, and its weights where a device needs them."""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import get_args
from typing import Literal
from typing import Protocol

import numpy as np

from mooncake_jax.blocks.identity import kv_identity
from mooncake_jax.cluster_spec import KVDtype
from mooncake_jax.model.checkpoints.fingerprint import fingerprint
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.workload.session_file import Message
from mooncake_jax.workload.words import WordCodec
from scripts.gin_source import ROOT

Weights = Literal['float32', 'bfloat16', 'int8']
# KVCache of these has scales, measured on a text that should not change.
SCALED: tuple[KVDtype, ...] = ('int8', 'float8_e4m3fn')
SCALES_TEXT = 'LICENSE'


class Tokens(Protocol):
  """What serving text needs of a tokenizer."""

  def encode(self, text: str) -> list[int]: ...

  def encode_chat(self, messages: Sequence[Message]) -> list[int]: ...

  def decode(self, ids: Sequence[int]) -> str: ...

  def token_bytes(self, token: int) -> bytes: ...


@dataclass(frozen=True)
class Model:
  """A checkpoint, or a shape with random weights.

  Attributes:
    path: a Hugging Face style folder, an orbax folder or a GGUF file, as
      given or from the repository's root; None for random weights.
    config: the shape of random weights, which also stand in where there is
      nothing at `path`.
    seed: of random weights.
    weights: of 'bfloat16' are all parameters, and activations with them: half
      the memory, and what accelerators are made for. 'int8' makes the layers'
      matrices smaller; see model/quantize.py.
  """

  path: str | None = None
  config: ModelConfig | None = None
  seed: int = 0
  weights: Weights = 'float32'

  def __post_init__(self):
    if self.weights not in get_args(Weights):
      raise ValueError(
        f'Model.weights={self.weights!r} must be one of {get_args(Weights)}'
      )
    if self.path is None and self.config is None:
      raise ValueError('Model.path=None and Model.config=None: give one')

  def find(self) -> Path | None:
    """Where the checkpoint lies; None for random weights.

    Raises:
      FileNotFoundError: there is none and no shape to stand in for it.
    """
    if self.path is None:
      return None
    for found in (Path(self.path), ROOT / self.path):
      if found.exists():
        return found
    if self.config is None:
      raise FileNotFoundError(f'Model.path={self.path!r}: no such model')
    return None

  def read_config(self) -> ModelConfig:
    """The shape, without the weights."""
    path = self.find()
    if path is None:
      assert self.config is not None
      return self.config
    if path.is_dir():
      return ModelConfig.from_hf(path)
    from mooncake_jax.model.checkpoints import gguf_config
    from mooncake_jax.model.checkpoints.gguf_file import GGUFFile

    return ModelConfig.from_hf(gguf_config.hf_config(GGUFFile(path)))

  def identity(self, kv_dtype: KVDtype) -> str:
    """Seed of block keys: another model's KVCache is never reused."""
    path = self.find()
    weights = f'random-{self.seed}' if path is None else fingerprint(path)
    if self.weights != 'float32':
      weights += f'-{self.weights}'
    return kv_identity(self.read_config(), weights, kv_dtype)

  def load_params(
    self, mesh: Any = None, scales: Mapping[str, np.ndarray] | None = None
  ) -> Any:
    """Weights, on an instance's mesh if one is given.

    Args:
      scales: of the KVCache, see `scripts.kv_scales`.
    """
    from mooncake_jax.model import quantize

    loaded = self._load(mesh)
    if self.weights == 'int8':
      loaded = quantize.quantize_weights(loaded)
    return loaded if scales is None else quantize.scaled(loaded, scales, mesh)

  def _load(self, mesh: Any) -> Any:
    """In bfloat16 or float32; of int8 these are not made yet."""
    import jax

    from mooncake_jax.model import params
    from mooncake_jax.model.checkpoints.load import load_model

    dtype = 'float32' if self.weights == 'int8' else self.weights
    path = self.find()
    if path is not None:
      return load_model(path, mesh, dtype)[1]
    key = jax.random.key(self.seed)
    return params.init_params(self.read_config(), key, dtype, mesh)

  def load_tokenizer(self, config: ModelConfig) -> Tokens:
    """The checkpoint's tokenizer; for random weights, a token a word."""
    path = self.find()
    if path is None:
      return WordCodec(config.vocab_size)
    from mooncake_jax.model.tokenizer import Tokenizer

    read = Tokenizer.from_folder if path.is_dir() else Tokenizer.from_gguf
    return read(path)


def stop_token_ids(tokenizer: Tokens) -> tuple[int, ...]:
  """What ends an answer; nothing does where tokens mean nothing."""
  return tuple(getattr(tokenizer, 'eos_token_ids', ()))

# SPDX-License-Identifier: Apache-2.0
"""A GGUF file seen as Hugging Face tensors: names, shapes, dequantised rows.

The container is read by the `gguf` library (memory-mapped; opening costs about
2 s for a 50k vocabulary since the library parses it in Python). Three things
differ from a Hugging Face checkpoint and are undone here: the names, the block
quantisation, and, for the `llama` architecture only, the order of the rows of
Q and K inside a head (adjacent rotary pairs there, two halves here).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
from gguf.quants import dequantize
import numpy as np

# GGUF name -> Hugging Face name; `{}` is the layer.
_NAMES = {
  'token_embd.weight': 'model.embed_tokens.weight',
  'output_norm.weight': 'model.norm.weight',
  'output.weight': 'lm_head.weight',
}
_LAYER_NAMES = {
  'attn_norm.weight': 'input_layernorm.weight',
  'attn_q.weight': 'self_attn.q_proj.weight',
  'attn_k.weight': 'self_attn.k_proj.weight',
  'attn_v.weight': 'self_attn.v_proj.weight',
  'attn_q.bias': 'self_attn.q_proj.bias',
  'attn_k.bias': 'self_attn.k_proj.bias',
  'attn_v.bias': 'self_attn.v_proj.bias',
  'attn_q_norm.weight': 'self_attn.q_norm.weight',
  'attn_k_norm.weight': 'self_attn.k_norm.weight',
  'attn_output.weight': 'self_attn.o_proj.weight',
  'ffn_norm.weight': 'post_attention_layernorm.weight',
  'ffn_gate.weight': 'mlp.gate_proj.weight',
  'ffn_up.weight': 'mlp.up_proj.weight',
  'ffn_down.weight': 'mlp.down_proj.weight',
}
# Read with the configuration, not a weight.
ROPE_FACTORS = 'rope_freqs.weight'


class GGUFFile:
  """An open GGUF file, as a source of Hugging Face tensors.

  Attributes:
    path: where it was read from.
    metadata: key -> value (number, string or list), as stored.
    rope_factors: float32 [H / 2] divisors of the rotary frequencies, or None.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is no GGUF, is cut short, or has a tensor without a
      Hugging Face name; the message names the file and the tensor.
  """

  def __init__(self, path: str | Path):
    self.path = str(path)
    reader = _open(self.path)
    self.metadata = {
      name: _contents(self.path, name, field)
      for name, field in reader.fields.items()
    }
    stored = {t.name: t for t in reader.tensors}
    factors = stored.pop(ROPE_FACTORS, None)
    self.rope_factors = None if factors is None else np.array(factors.data)
    self._tensors = {_hf_name(self.path, n): t for n, t in stored.items()}
    self._head_dim = head_dim(self)

  def names(self) -> Iterator[str]:
    """The Hugging Face names of the tensors, in the file's order."""
    return iter(self._tensors)

  def shape(self, name: str) -> tuple[int, ...]:
    """Shape of tensor `name`, outermost dimension first as in torch."""
    return tuple(int(n) for n in reversed(self._tensors[name].shape))

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Dequantised float32 `tensor[index]`; only its rows are decoded.

    Rows of Q and K must be taken in whole heads.
    """
    tensor, rows = self._tensors[name], index[0]
    values = _dequantised(self.path, tensor, rows)
    if self._is_permuted(name):
      values = _unpermuted(values, self._head_dim)
    return np.array(values[(slice(None), *index[1:])])  # not the mapped file

  def get(self, key: str, default: Any = None) -> Any:
    """Metadata `key` of this architecture, `default` where it is absent.

    `key` may hold `{arch}`, as in '{arch}.block_count'.
    """
    return self.metadata.get(key.format(arch=self.architecture), default)

  def require(self, key: str) -> Any:
    """Like `get`; a ValueError names the file and the field if absent."""
    value = self.get(key)
    if value is None:
      name = key.format(arch=self.architecture)
      raise ValueError(f'{self.path}: GGUF field {name!r} is missing')
    return value

  @property
  def architecture(self) -> str:
    """The value of general.architecture, e.g. 'llama'."""
    return str(self.metadata.get('general.architecture', ''))

  def _is_permuted(self, name: str) -> bool:
    rotated = '.q_proj.' in name or '.k_proj.' in name
    return rotated and self.architecture == 'llama'


class _BoundedReader(gguf.GGUFReader):
  """Fails at the end of the file.

  The library reads on there without an error, so that a damaged count costs
  all memory.
  """

  def _get(self, offset: int, dtype: Any, count: int = 1, **order: Any):
    part = super()._get(offset, dtype, count, **order)
    if len(part) < count:
      raise ValueError(f'{offset=} and {count=} reach beyond its end')
    return part


def head_dim(file: GGUFFile) -> int:
  """Size H of a head: attention.key_length, else model dim / heads."""
  length = file.get('{arch}.attention.key_length')
  if length is not None:
    return int(length)
  model_dim = int(file.require('{arch}.embedding_length'))
  return model_dim // int(file.require('{arch}.attention.head_count'))


def _open(path: str) -> gguf.GGUFReader:
  if not Path(path).is_file():
    raise FileNotFoundError(f'{path}: no such GGUF file')
  with open(path, 'rb') as file:
    magic = file.read(4)
  if magic != b'GGUF':
    raise ValueError(f'{path}: {magic=} is not the GGUF magic')
  try:  # what the library raises on damage depends on where the damage is
    return _BoundedReader(path)
  except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
    reason = ' '.join(str(error).split())
    raise ValueError(f'{path}: damaged or truncated GGUF: {reason}') from error


def _contents(path: str, name: str, field: gguf.ReaderField) -> Any:
  try:
    return field.contents()
  except (ValueError, IndexError) as error:
    raise ValueError(f'{path}: GGUF field {name!r}: {error}') from error


def _hf_name(path: str, name: str) -> str:
  if name in _NAMES:
    return _NAMES[name]
  block, _, rest = name.partition('.')
  layer, _, suffix = rest.partition('.')
  if block != 'blk' or suffix not in _LAYER_NAMES:
    raise ValueError(f'{path}: GGUF tensor {name!r} belongs to no known model')
  return f'model.layers.{layer}.{_LAYER_NAMES[suffix]}'


def _dequantised(
  path: str, tensor: gguf.ReaderTensor, rows: slice
) -> np.ndarray:
  try:
    return dequantize(tensor.data[rows], tensor.tensor_type)
  except NotImplementedError as error:
    kind = tensor.tensor_type.name
    raise ValueError(
      f'{path}: GGUF tensor {tensor.name!r} has type {kind!r}, '
      'which the gguf library cannot dequantise'
    ) from error


def _unpermuted(rows: np.ndarray, size: int) -> np.ndarray:
  """Rows of whole heads from adjacent pairs to halves.

  For H = 4 a head's rows are stored as 0 2 1 3 and come out as 0 1 2 3.
  """
  assert rows.shape[0] % size == 0, (rows.shape, size)
  pairs = rows.reshape(-1, size // 2, 2, *rows.shape[1:])
  return pairs.swapaxes(1, 2).reshape(rows.shape)

# SPDX-License-Identifier: Apache-2.0
"""What a message offers, held against the KVCache's own shape."""

from collections.abc import Mapping
from dataclasses import dataclass
import math
from typing import Any

import numpy as np

from mooncake_jax.transfer.entries import aligned
from mooncake_jax.transfer.segment import Part


@dataclass(frozen=True)
class PartShape:
  """What KVCache looks like here: parts [L, 2, S, K, H], heads in slices."""

  num_layers: int
  num_kv_heads: int
  head_dim: int
  max_tokens: int
  dtype: np.dtype

  def part(self, num_layers: int = 1, num_tokens: int = 1) -> Part:
    """One of the first layers, all ones."""
    shape = (num_layers, 2, num_tokens, self.num_kv_heads, self.head_dim)
    return Part(0, num_layers, (np.ones(shape, self.dtype),))

  def check(self, offer: 'Offered') -> None:
    """Raises ValueError unless the offer is such a part."""
    start, stop = offer.layers
    heads = 0
    for shape in offer.shapes:
      if len(shape) != 5:
        raise ValueError(f'{shape=} must be [L, 2, S, K, H]')
      L, two, S, K, H = shape
      heads += K
      fits = (L, two, H) == (stop - start, 2, self.head_dim)
      if not fits or not 0 < S <= self.max_tokens or K < 1:
        raise ValueError(f'{shape=} of layers {offer.layers} is none of {self}')
    if offer.dtype != self.dtype.name or heads != self.num_kv_heads:
      raise ValueError(
        f'dtype={offer.dtype} with {heads} KV heads is none of {self}'
      )
    if not 0 <= start < stop <= self.num_layers:
      raise ValueError(f'layers={offer.layers} of {self.num_layers}')


@dataclass(frozen=True)
class Offered:
  """A part that another process would send."""

  number: int
  layers: tuple[int, int]
  dtype: str
  shapes: tuple[tuple[int, ...], ...]
  total: int | None

  @classmethod
  def of(cls, message: Mapping[str, Any]) -> 'Offered':
    """Raises ValueError if the message offers nothing."""
    try:
      start, stop = map(int, message['layers'])
      shapes = tuple(tuple(map(int, shape)) for shape in message['shapes'])
      total = None if message['total'] is None else int(message['total'])
      number, dtype = int(message['number']), str(message['dtype'])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
      raise ValueError(f'no offer: {error!r}') from error
    return cls(number, (start, stop), dtype, shapes, total)

  def sizes(self, dtype: np.dtype) -> list[int]:
    """Bytes of its slices."""
    return [math.prod(shape) * dtype.itemsize for shape in self.shapes]

  def num_bytes(self, dtype: np.dtype) -> int:
    return sum(self.sizes(dtype))

  def empty(self, dtype: np.dtype) -> list[np.ndarray]:
    """New memory for its slices."""
    return [
      aligned(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
      for shape in self.shapes
    ]

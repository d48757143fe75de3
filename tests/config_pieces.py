# SPDX-License-Identifier: Apache-2.0
"""Things that tests/test_config.py binds: the shapes that configs use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Inner:
  num_tokens: int = 4
  ratio: float = 0.5


@dataclass(frozen=True)
class Other:
  name: str = 'other'


def rows(count: int, seed: int = 0) -> list[int]:
  return [seed] * count


def first(candidates: list[int], power: int = 1) -> int:
  return candidates[0] ** power


@dataclass(frozen=True)
class Root:
  inner: Inner
  rows: list[int] | None = None
  policy: Callable[[list[int]], int] | None = None
  mode: Literal['device', 'virtual'] = 'virtual'
  sizes: tuple[int, ...] = (1, 2)
  limit: int | None = None

  def __post_init__(self):
    if self.limit is not None and self.limit < 0:
      raise ValueError(f'Root.limit={self.limit} must be >= 0')

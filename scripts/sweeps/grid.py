# SPDX-License-Identifier: Apache-2.0
"""Which runs a sweep consists of, as values.

A sweep is a run file and axes: a binding and the values that it takes. Which
points they span is the sweep's mode: 'grid', each combination; 'list', the
first values together, then the second ones; 'random', draws of them. Points
that build the same, by their operative config, are one.
"""

import ast
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from hashlib import sha256
import itertools
import math
import random
import re
from typing import Any
from typing import get_args
from typing import Literal

from scripts.config import ConfigError
from scripts.config import load
from scripts.experiment import Experiment
from scripts.gin_source import statements

Mode = Literal['grid', 'list', 'random']
_RANGE = re.compile(r'(log_)?uniform\(([^,]+),([^,]+)\)')


@dataclass(frozen=True)
class Sweep:
  """What is swept over, and what of it is shown.

  Attributes:
    run: path of the run file.
    over: values by binding: {'ClusterSpec.chunk_tokens': [512, 1024]}; in mode
      'random' also a range, 'uniform(0.1, 0.5)' or 'log_uniform(1e9, 1e12)',
      of whole numbers where both ends are.
    bind: bindings that are the same for all points, 'X.y=z'.
    show: figures that the table shows, by their names in `summary.json`; the
      first is drawn over the first axis.
    mode: see the module.
    draws: points of mode 'random', all different where axes are lists.
    seed: of these draws.
  """

  run: str
  over: Mapping[str, list[Any] | str] = field(default_factory=dict)
  bind: tuple[str, ...] = ()
  show: tuple[str, ...] = (
    'ttft_s.mean',
    'ttft_s.p90',
    'tbt_tail_s.mean',
    'hit_rate',
    'effective_request_capacity',
    'output_tokens_per_s',
  )
  mode: Mode = 'grid'
  draws: int = 16
  seed: int = 0

  def __post_init__(self):
    for name, values in self.over.items():
      if not values:
        raise ValueError(f'Sweep.over[{name!r}]={values} must not be empty')
      if isinstance(values, str) and self.mode != 'random':
        raise ValueError(
          f"Sweep.over[{name!r}]={values!r} needs Sweep.mode='random'"
        )
    if self.mode not in get_args(Mode):
      raise ValueError(
        f'Sweep.mode={self.mode!r} must be one of {get_args(Mode)}'
      )
    if self.draws < 1:
      raise ValueError(f'Sweep.draws={self.draws} must be >= 1')
    lengths = {name: len(values) for name, values in self.over.items()}
    if self.mode == 'list' and len({*lengths.values()}) > 1:
      raise ValueError(
        f"Sweep.mode='list' needs axes of one length, found {lengths}"
      )
    if not self.show:
      raise ValueError(f'Sweep.show={self.show} must not be empty')


@dataclass(frozen=True)
class Point:
  """One run of a sweep.

  Attributes:
    values: by axis.
    bindings: all of the run's, those of the axes last.
    name: of its folder, from its operative config; '' if it cannot be built.
    reason: why it cannot.
    on_devices: whether it needs JAX devices, here or in processes of its own,
      or simulates.
  """

  values: Mapping[str, Any]
  bindings: tuple[str, ...]
  name: str
  reason: str = ''
  on_devices: bool = False


def parse_axis(text: str) -> tuple[str, list[Any] | str]:
  """'X.y=[1, 2]' -> ('X.y', [1, 2]); a range stays as it is written.

  Raises:
    ConfigError: it does not read so.
  """
  name, equals, written = text.partition('=')
  if _RANGE.fullmatch(written.strip()):
    return name.strip(), written.strip()
  values = _read_values(written) if equals else None
  if not isinstance(values, list | tuple) or not values:
    raise ConfigError(f"--over {text!r}: must read 'X.y=[value, ...]'")
  return name.strip(), list(values)


def _read_values(written: str) -> Any:
  """As gin reads them: `@module.name` is a function or class."""
  try:
    (statement,) = statements(f'values = {written.strip()}', '--over')
  except (ConfigError, ValueError):
    return None
  return getattr(statement, 'value', None)


def points(sweep: Sweep) -> list[Point]:
  """All points; of a grid the last axis fastest.

  Raises:
    ConfigError: none of them can be built; what is wrong with the first.
  """
  made = [
    _point(sweep, dict(zip(sweep.over, values))) for values in _values(sweep)
  ]
  if all(point.reason for point in made):
    raise ConfigError(made[0].reason)
  return made


def _values(sweep: Sweep) -> Iterable[tuple[Any, ...]]:
  """The axes' values of each point."""
  axes = [*sweep.over.values()]
  if sweep.mode == 'list':
    return zip(*axes)
  if sweep.mode == 'grid':
    return itertools.product(*axes)
  rng = random.Random(sweep.seed)
  lists = [axis for axis in axes if not isinstance(axis, str)]
  if len(lists) == len(axes):
    return _some(lists, sweep.draws, rng)
  return [
    tuple(
      _draw(axis, rng) if isinstance(axis, str) else rng.choice(axis)
      for axis in axes
    )
    for _ in range(sweep.draws)
  ]


def _some(
  axes: Sequence[Sequence[Any]], draws: int, rng: random.Random
) -> list[tuple[Any, ...]]:
  """Different points of a grid, which may be too large to be made."""
  sizes = [len(axis) for axis in axes]
  total = math.prod(sizes)
  chosen = []
  for number in rng.sample(range(total), min(draws, total)):
    values = []
    for axis in axes:
      number, at = divmod(number, len(axis))
      values.append(axis[at])
    chosen.append(tuple(values))
  return chosen


def _draw(written: str, rng: random.Random) -> float | int:
  """One value of a range.

  Raises:
    ValueError: it does not read so, or its ends are none.
  """
  match = _RANGE.fullmatch(written)
  log, *ends = match.groups() if match else (None, '', '')
  try:
    low, high = (ast.literal_eval(text.strip()) for text in ends)
  except (SyntaxError, ValueError):
    raise ValueError(
      f'Sweep.over: {written!r} must read uniform(low, high) or '
      'log_uniform(low, high)'
    ) from None
  if not low < high or (log and low <= 0):
    raise ValueError(f'Sweep.over: {written!r} is no range')
  share = rng.random()
  value = low * (high / low) ** share if log else low + share * (high - low)
  return (
    round(value) if isinstance(low, int) and isinstance(high, int) else value
  )


def _point(sweep: Sweep, values: dict[str, Any]) -> Point:
  own = tuple(f'{name}={value!r}' for name, value in values.items())
  bindings = (*sweep.bind, *own)
  try:
    experiment, operative = load(sweep.run, bindings, Experiment)
  except (ValueError, OSError) as error:
    return Point(values, bindings, '', str(error))
  name = sha256(operative.encode()).hexdigest()[:12]
  return Point(
    values, bindings, name, on_devices=experiment.backend != 'virtual'
  )

# SPDX-License-Identifier: Apache-2.0
"""Which runs a sweep consists of, as values.

A sweep is a run file and axes: a binding and the values that it takes. Each
combination is a point; two that build the same, by their operative config, are
one.
"""

import ast
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from hashlib import sha256
import itertools
from typing import Any

from scripts.config import ConfigError
from scripts.config import load
from scripts.experiment import Experiment

Axes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Sweep:
  """What is swept over, and what of it is shown.

  Attributes:
    run: path of the run file.
    over: values by binding: {'ClusterSpec.chunk_tokens': [512, 1024]}.
    bind: bindings that are the same for all points, 'X.y=z'.
    show: figures that the table shows, by their names in `summary.json`; the
      first is drawn over the first axis.
  """

  run: str
  over: Mapping[str, list[Any]] = field(default_factory=dict)
  bind: tuple[str, ...] = ()
  show: tuple[str, ...] = (
    'ttft_s.mean',
    'ttft_s.p90',
    'tbt_tail_s.mean',
    'hit_rate',
    'effective_request_capacity',
    'output_tokens_per_s',
  )

  def __post_init__(self):
    for name, values in self.over.items():
      if not values:
        raise ValueError(f'Sweep.over[{name!r}]={values} must not be empty')
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
    on_devices: whether it needs JAX devices, or simulates.
  """

  values: Mapping[str, Any]
  bindings: tuple[str, ...]
  name: str
  reason: str = ''
  on_devices: bool = False


def parse_axis(text: str) -> tuple[str, list[Any]]:
  """'X.y=[1, 2]' -> ('X.y', [1, 2]).

  Raises:
    ConfigError: it does not read so.
  """
  name, equals, written = text.partition('=')
  try:
    values = ast.literal_eval(written.strip()) if equals else None
  except (SyntaxError, ValueError):
    values = None
  if not isinstance(values, list | tuple) or not values:
    raise ConfigError(f"--over {text!r}: must read 'X.y=[value, ...]'")
  return name.strip(), list(values)


def points(sweep: Sweep) -> list[Point]:
  """All points, the last axis fastest.

  Raises:
    ConfigError: none of them can be built; what is wrong with the first.
  """
  made = [
    _point(sweep, dict(zip(sweep.over, values)))
    for values in itertools.product(*sweep.over.values())
  ]
  if all(point.reason for point in made):
    raise ConfigError(made[0].reason)
  return made


def _point(sweep: Sweep, values: dict[str, Any]) -> Point:
  own = tuple(f'{name}={value!r}' for name, value in values.items())
  bindings = (*sweep.bind, *own)
  try:
    experiment, operative = load(sweep.run, bindings, Experiment)
  except (ValueError, OSError) as error:
    return Point(values, bindings, '', str(error))
  name = sha256(operative.encode()).hexdigest()[:12]
  return Point(
    values, bindings, name, on_devices=experiment.backend == 'device'
  )

# SPDX-License-Identifier: Apache-2.0
"""Points of a sweep in this process, one after another.

Runs on the same devices take the same weights, memory and programs, one such
set at a time. Programs that another has compiled for the same shapes are not
compiled again: a sweep over chunk sizes compiles the chunk's program for each
and the rest once.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from contextlib import ExitStack
from pathlib import Path

from mooncake_jax.model_config import ModelConfig
from scripts.config import load
from scripts.experiment import Experiment
from scripts.serving import backends
from scripts.serving import MakeBackend
from scripts.sweeps import point
from scripts.sweeps.grid import Point


def run_points(
  config: str,
  points: Sequence[Point],
  out: Path,
  on_end: Callable[[Point], None],
) -> None:
  """Runs all points; each leaves a result in its folder of `out`.

  Those on the same devices follow each other.
  """
  experiments = {
    each.name: load(config, each.bindings, Experiment)[0]
    for each in points
    if each.on_devices
  }
  _start_jax([*experiments.values()])
  groups: dict[str, list[Point]] = {}
  for each in points:
    key = devices_of(experiments[each.name]) if each.on_devices else ''
    groups.setdefault(key, []).append(each)
  for same in groups.values():
    with ExitStack() as stack:
      devices = SharedDevices(stack)
      for each in same:
        point.run_here(config, each.bindings, out / each.name, devices.opened)
        on_end(each)


def _start_jax(experiments: Sequence[Experiment]) -> None:
  """Once JAX runs, a CPU's number of devices stays as it is."""
  if experiments:
    from scripts.device import num_devices
    from scripts.device import start_jax

    start_jax(max(num_devices(e.cluster) for e in experiments))


class SharedDevices:
  """The backend of experiments on the same devices, opened at first use.

  Its runs follow each other: it is idle when it is taken.
  """

  def __init__(self, stack: ExitStack):
    """Opens nothing yet; `stack` closes what was opened."""
    self._stack = stack
    self._make_backend: MakeBackend | None = None

  @contextmanager
  def opened(
    self, experiment: Experiment, config: ModelConfig
  ) -> Iterator[MakeBackend]:
    """As `serving.backends`."""
    if experiment.backend == 'virtual':
      with backends(experiment, config) as make_backend:
        yield make_backend
      return
    if self._make_backend is None:
      self._make_backend = self._stack.enter_context(
        backends(experiment, config)
      )
    yield self._make_backend


def devices_of(experiment: Experiment) -> str:
  """What experiments on the same devices have in common.

  All of the cluster: chunks are padded to lengths that follow from their size,
  and are computed in the layer groups that streaming asks for, so that one
  opened for another size measures something else.
  """
  e = experiment
  return repr((e.backend, e.model, e.cluster, e.attention, e.ray, e.store))

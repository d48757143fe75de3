# SPDX-License-Identifier: Apache-2.0
"""Points of a sweep in this process, one after another.

Runs on devices that differ only in how a prompt is cut and moved take the same
devices, programs and weights: a sweep over chunk sizes compiles once.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from mooncake_jax.cluster_spec import ClusterSpec
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
  """Runs all points; each leaves a result in its folder of `out`."""
  experiments = [
    load(config, each.bindings, Experiment)[0]
    for each in points
    if each.on_devices
  ]
  with ExitStack() as stack:
    shared = SharedDevices(stack, experiments)
    for each in points:
      point.run_here(config, each.bindings, out / each.name, shared.opened)
      on_end(each)


class SharedDevices:
  """Backends of experiments on devices, opened at first use.

  Runs on devices follow each other: a backend is idle when it is taken.
  """

  def __init__(self, stack: ExitStack, experiments: Sequence[Experiment]):
    """Gathers which chunk sizes each backend must have programs for.

    Args:
      stack: closes what was opened.
    """
    self._stack = stack
    self._start_jax(experiments)
    self._chunks: dict[str, list[ClusterSpec]] = {}
    for experiment in experiments:
      chunks = self._chunks.setdefault(_devices_of(experiment), [])
      chunks.append(experiment.cluster)
    self._open: dict[str, MakeBackend] = {}

  def _start_jax(self, experiments: Sequence[Experiment]) -> None:
    """Once JAX runs, a CPU's number of devices stays as it is."""
    if experiments:
      from scripts.device import num_devices
      from scripts.device import start_jax

      start_jax(max(num_devices(e.cluster) for e in experiments))

  @contextmanager
  def opened(
    self, experiment: Experiment, config: ModelConfig
  ) -> Iterator[MakeBackend]:
    """As `serving.backends`."""
    if experiment.backend == 'virtual':
      with backends(experiment, config) as make_backend:
        yield make_backend
      return
    key = _devices_of(experiment)
    if key not in self._open:
      cluster = _for_all(experiment.cluster, self._chunks[key])
      self._open[key] = self._stack.enter_context(
        backends(replace(experiment, cluster=cluster), config)
      )
    yield self._open[key]


def _for_all(
  cluster: ClusterSpec, others: Sequence[ClusterSpec]
) -> ClusterSpec:
  """With programs for the chunks of all others, itself among them."""
  sizes = {each.chunk_tokens for each in others}
  fixed = replace(cluster, chunk_tokens=max(sizes), chunking='fixed')
  is_fixed = all(each.chunking == 'fixed' for each in others)
  if is_fixed and sizes <= {*fixed.chunk_buckets}:
    return fixed
  return replace(fixed, chunking='auto')  # for sizes up to the largest


def _devices_of(experiment: Experiment) -> str:
  """What experiments with the same devices have in common."""
  cluster = replace(
    experiment.cluster,
    chunk_tokens=1,
    chunking='fixed',
    streaming='layers',
  )
  return repr((experiment.model, cluster))

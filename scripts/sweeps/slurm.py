# SPDX-License-Identifier: Apache-2.0
"""Points of a sweep as an array of SLURM jobs, by submitit."""

import ast
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.config import ConfigError
from scripts.sweeps import point
from scripts.sweeps.grid import Point


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
  """'KEY=VALUE' each, as `submitit.AutoExecutor.update_parameters` takes them:
  timeout_min=60, gpus_per_node=1, slurm_partition=gpu.

  Raises:
    ConfigError: one does not read so.
  """
  options: dict[str, Any] = {}
  for text in texts:
    name, equals, written = text.partition('=')
    if not equals:
      raise ConfigError(f'--slurm {text!r}: must read KEY=VALUE')
    try:
      options[name] = ast.literal_eval(written)
    except (SyntaxError, ValueError):
      options[name] = written  # a word: slurm_partition=gpu
  return options


def run_points(
  config: str,
  points: Sequence[Point],
  out: Path,
  workers: int,
  options: Mapping[str, Any],
  on_end: Callable[[Point], None],
  cluster: str = 'slurm',
) -> None:
  """Submits all points, at most `workers` at a time, and waits for them.

  Raises:
    ConfigError: submitit is not installed, or does not know an option.
  """
  try:
    import submitit
  except ImportError:
    raise ConfigError("--slurm needs pip install -e '.[slurm]'") from None
  executor = submitit.AutoExecutor(out / 'slurm', cluster=cluster)
  try:
    executor.update_parameters(
      slurm_array_parallelism=workers, name=out.name, **options
    )
  except (NameError, TypeError) as error:
    raise ConfigError(f'--slurm: {error}') from None
  folders = [out / each.name for each in points]
  jobs = executor.map_array(
    point.run_point,
    [config] * len(points),
    [each.bindings for each in points],
    folders,
  )
  for job, each, folder in zip(jobs, points, folders):
    error = job.exception()
    if point.read(folder) is None:
      last = str(error).strip().split('\n')[-1]
      point.write(folder, {'status': 'failed', 'reason': last})
    on_end(each)

# SPDX-License-Identifier: Apache-2.0
"""Points of a sweep as tasks of a Ray cluster.

Results go to folders, so all of its machines need to see them.
"""

from collections.abc import Callable
from collections.abc import Sequence
import os
from pathlib import Path

from mooncake_jax.distributed.token import require_token
from scripts.config import ConfigError
from scripts.sweeps import point
from scripts.sweeps.grid import Point


def run_points(
  config: str,
  points: Sequence[Point],
  out: Path,
  address: str | None,
  workers: int,
  timeout_s: float,
  on_end: Callable[[Point], None],
) -> None:
  """Runs all points; each leaves a result in its folder of `out`.

  Args:
    address: of the cluster; None starts one here, as long as this takes.
    workers: at a time, here; 0 is one a core.
    timeout_s: where none ends for so long, those that are left are given up.

  Raises:
    ConfigError: Ray is not installed.
  """
  if address is None:
    require_token()
  try:
    import ray

    from mooncake_jax.distributed.launching import join_ray
    from mooncake_jax.distributed.spec import RaySpec
  except ImportError:
    raise ConfigError("--ray needs pip install -e '.[cluster]'") from None
  joined = join_ray(RaySpec(address=address), workers or os.cpu_count() or 1)
  try:
    task = ray.remote(num_cpus=1, max_retries=0)(point.run_here)
    waiting = {
      task.remote(config, each.bindings, (out / each.name).resolve()): each
      for each in points
    }
    while waiting:
      ended, _ = ray.wait([*waiting], num_returns=1, timeout=timeout_s)
      for reference in ended or [*waiting]:
        each, why = waiting.pop(reference), f'none ended in {timeout_s:g} s'
        if ended:
          why = _why(ray, reference)
        else:
          ray.cancel(reference, force=True)
        if point.read(out / each.name) is None:
          point.write(out / each.name, {'status': 'failed', 'reason': why})
        on_end(each)
  finally:
    if joined:
      ray.shutdown()


def _why(ray, reference) -> str:
  """Why a task that ended left no result."""
  try:
    ray.get(reference)
  except ray.exceptions.RayError as error:
    return str(error).strip().split('\n')[-1]
  return 'left no result'

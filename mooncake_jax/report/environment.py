# SPDX-License-Identifier: Apache-2.0
"""What a number was measured on: versions, devices, commit, seed."""

from collections.abc import Sequence
from importlib import metadata
import os
from pathlib import Path
import platform
import subprocess
from typing import Any

PACKAGES = ('mooncake-jax', 'jax', 'jaxlib', 'numpy', 'flax')


def environment(
  devices: Sequence[str], seed: int | None, started: str
) -> dict[str, Any]:
  """Everything needed to tell two runs' surroundings apart.

  Args:
    devices: as JAX names them; empty for a simulation.
    seed: of the workload, None where nothing is drawn.
    started: wall-clock time at the start of the run, ISO 8601.
  """
  return {
    'started': started,
    'seed': seed,
    'commit': commit(Path(__file__).parent),
    'python': platform.python_version(),
    'versions': {name: _version(name) for name in PACKAGES},
    'devices': list(devices),
    'machine': platform.machine(),
    'system': platform.system(),
    'cpus': os.cpu_count(),
    # Of all processes, the minute before: whether the machine was quiet.
    'load': round(os.getloadavg()[0], 1),
  }


def commit(folder: Path) -> str | None:
  """The checked-out commit, '+dirty' if files differ; None outside git."""
  head = _git(folder, 'rev-parse', 'HEAD')
  if head is None:
    return None
  dirty = _git(folder, 'status', '--porcelain', '--untracked-files=no')
  return f'{head}+dirty' if dirty else head


def _git(folder: Path, *args: str) -> str | None:
  try:
    run = subprocess.run(
      ['git', *args], cwd=folder, capture_output=True, text=True, timeout=10
    )
  except (OSError, subprocess.TimeoutExpired):
    return None
  return run.stdout.strip() if run.returncode == 0 else None


def _version(name: str) -> str | None:
  try:
    return metadata.version(name)
  except metadata.PackageNotFoundError:
    return None

# SPDX-License-Identifier: Apache-2.0
"""One point of a sweep: runs in a process of its own, leaves what it gave.

`point.json` is written last and at once, so that it is there only of a run
that ended: {"status": "done", "figures": {...}} or {"status": "failed",
"reason": ...}. Beside it lie `log.txt` and the run's results, but for the page:
`scripts/run.py FOLDER/operative_config.gin` makes it.
"""

from collections.abc import Sequence
from contextlib import redirect_stderr
from contextlib import redirect_stdout
import json
import os
from pathlib import Path
import traceback
from typing import Any

from mooncake_jax.metrics.prefill_split import mean_split
from mooncake_jax.metrics.table import flat
from scripts.config import load
from scripts.experiment import Experiment
from scripts.running import Opened
from scripts.running import run
from scripts.serving import backends

RESULT = 'point.json'
LOG = 'log.txt'


def run_point(config: str, bindings: Sequence[str], folder: Path) -> None:
  """Runs one experiment; what it prints goes to its log."""
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / LOG).open('w') as log:
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    run_into(config, bindings, folder)


def run_here(
  config: str, bindings: Sequence[str], folder: Path, opened: Opened = backends
) -> None:
  """As `run_point`, in a process that has other work and output besides."""
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / LOG).open('w') as log:
    with redirect_stdout(log), redirect_stderr(log):
      run_into(config, bindings, folder, opened)


def run_into(
  config: str, bindings: Sequence[str], folder: Path, opened: Opened = backends
) -> None:
  """Runs one experiment; its folder has a result, whatever comes of it.

  Args:
    opened: gives the backend, see `serving.backends`.
  """
  try:
    experiment, operative = load(config, bindings, Experiment)
    outcomes = run(experiment, operative, folder, opened, with_page=False)
  except Exception as error:
    # Whatever it is: the other points go on, and the log has the traceback.
    write(folder, {'status': 'failed', 'reason': str(error) or repr(error)})
    traceback.print_exc()
    return
  outcome = next(iter(outcomes.values()))
  figures = {
    **outcome.summary.to_dict(),
    'prefill': mean_split(outcome.journal),
  }
  write(folder, {'status': 'done', 'figures': flat(figures)})


def read(folder: Path) -> dict[str, Any] | None:
  """What the point left; None where it did not end."""
  path = folder / RESULT
  return json.loads(path.read_text()) if path.exists() else None


def write(folder: Path, result: dict[str, Any]) -> None:
  """Leaves a result, whole or not at all."""
  folder.mkdir(parents=True, exist_ok=True)
  part = folder / f'{RESULT}.part'
  part.write_text(json.dumps(result, indent=2) + '\n')
  part.replace(folder / RESULT)


def reason(folder: Path, exit_code: int | None) -> str:
  """Why a process left no result: how it ended, and its last line."""
  how = f'exit status {exit_code}'
  if exit_code is not None and exit_code < 0:
    how = f'killed by signal {-exit_code}'
  path = folder / LOG
  lines = path.read_text().split('\n') if path.exists() else []
  last = next((line for line in reversed(lines) if line.strip()), '')
  return f'{how}: {last.strip()}' if last else how

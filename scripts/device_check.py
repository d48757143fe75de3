# SPDX-License-Identifier: Apache-2.0
r"""Checks and measures one host's accelerators, in under 8 minutes.

  python scripts/device_check.py [--small] [--minutes 7.5]

Needs no network and neither gin nor grain. A numerical self-test comes first:
if it fails nothing is measured. A later part that fails or takes too long is
reported, and the others go on. Figures are written as they come, to
$OUT/device_check.json or results/device_check.json; the exit status is 1 if a
part failed. On a CPU, or with --small, sizes are small: that shows that all
parts run, and no more.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
import json
import os
from pathlib import Path
import sys
import time

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a host may have the checkout and no install

import jax  # noqa: E402

from mooncake_jax.report.environment import environment  # noqa: E402
from scripts.device_checks import engine  # noqa: E402
from scripts.device_checks import kernels  # noqa: E402
from scripts.device_checks import limits  # noqa: E402
from scripts.device_checks import selftest  # noqa: E402
from scripts.device_checks import steps  # noqa: E402
from scripts.device_checks.part import Figures  # noqa: E402
from scripts.device_checks.part import Part  # noqa: E402
from scripts.device_checks.part import run_part  # noqa: E402
from scripts.device_checks.part import WHOLE_S  # noqa: E402
from scripts.device_checks.shapes import Sizes  # noqa: E402
from scripts.device_checks.shapes import sizes as make_sizes  # noqa: E402


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('--small', action='store_true', help='small sizes')
  parser.add_argument(
    '--minutes', type=float, default=WHOLE_S / 60, metavar='M'
  )
  args = parser.parse_args(argv)
  is_small = args.small or jax.default_backend() == 'cpu'
  folder = Path(os.environ.get('OUT') or ROOT / 'results')
  folder.mkdir(parents=True, exist_ok=True)
  found = check(
    make_sizes(is_small),
    args.minutes * 60,
    partial(_write, folder / 'device_check.json'),
  )
  print(json.dumps(found, indent=2))
  parts = found['parts'].values()
  return 0 if all(part['ok'] for part in parts) else 1


def check(
  sizes: Sizes, seconds: float, tell: Callable[[Figures], None]
) -> Figures:
  """All parts' figures, which `tell` gets after each part."""
  end_s = time.perf_counter() + seconds
  devices = [str(device) for device in jax.devices()]
  started = datetime.now().isoformat(timespec='seconds')
  found: Figures = {
    'environment': environment(devices, 0, started),
    'device_kind': jax.devices()[0].device_kind,
    'dtype': sizes.dtype,
    'parts': {},
  }
  for part in _parts(sizes, found['parts']):
    print(f'{part.name} ...', file=sys.stderr, flush=True)
    budget_s = part.budget_s * seconds / WHOLE_S
    part = replace(part, budget_s=budget_s)
    figures = run_part(part, end_s - time.perf_counter())
    found['parts'][part.name] = figures
    tell(found)
    if part.is_needed and not figures['ok']:
      break
  return found


def _parts(sizes: Sizes, found: dict[str, Figures]) -> list[Part]:
  """In order of need: what a short budget cuts off comes last."""

  def measure_steps(figures, budget):
    steps.measure(sizes, found['limits'], figures, budget)

  return [
    Part('selftest', selftest.check, 60, is_needed=True),
    Part('limits', partial(limits.measure, sizes), 40, is_needed=True),
    Part('kernels', partial(kernels.measure, sizes), 90),
    Part('steps', measure_steps, 130),
    Part('store', partial(engine.store, sizes), 40),
    Part('served', partial(engine.served, sizes), 60),
    Part('stages', partial(engine.stages, sizes), 40),
  ]


def _write(path: Path, found: Figures) -> None:
  path.write_text(json.dumps(found, indent=2) + '\n')


if __name__ == '__main__':
  status = main()
  sys.stdout.flush()
  os._exit(status)  # a part left behind on a thread must not hold it up

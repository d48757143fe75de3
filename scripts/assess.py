# SPDX-License-Identifier: Apache-2.0
"""Says whether Mooncake is worth it for a trace, why, and how sure that is.

  python scripts/assess.py [TRACE] --config configs/assess/NAME.gin
    [--tokenizer MODEL] [--here configs/assess/here/NAME.gin]
    [--bind 'X.y=z'] [--out DIR] [--workers N]

TRACE: Mooncake's or Bailian's JSON lines, Azure's or BurstGPT's CSV, or a log
of OpenAI-style requests (`workload/request_log.py`); without one, the workload
that the config names. Leaves report.html, which needs no other file, and
assessment.json in DIR, or in results/assess/NAME. Where fetching beats
recomputing is measured on this machine first with --here, which takes minutes;
else the page has what scripts/break_even.py left in results/break_even.
"""

import argparse
from dataclasses import asdict
from datetime import datetime
import json
from pathlib import Path
import sys

from mooncake_jax.assess.measured import Measured
from mooncake_jax.metrics.finite import finite
from mooncake_jax.report.assessment import assessment_page
from mooncake_jax.report.assessment import told
from mooncake_jax.report.environment import environment
from mooncake_jax.report.measured import read_measured
from mooncake_jax.report.measured import write_measured
from scripts.assessment.assess import assess
from scripts.assessment.here import measure_here
from scripts.assessment.spec import Assessment
from scripts.assessment.traces import read_trace
from scripts.config import load
from scripts.errors import one_line_errors
from scripts.experiment import Experiment
from scripts.gin_source import ROOT

KEPT = ROOT / 'results/break_even'


def main(argv: list[str] | None = None) -> int:
  args = _parser().parse_args(argv)
  started = datetime.now().isoformat(timespec='seconds')
  with one_line_errors():
    assessment, operative = load(args.config, args.bind, Assessment)
    trace, kind = Path(args.config).stem, 'generated'
    if args.trace:
      kind, rows = read_trace(args.trace, args.tokenizer, args.tenant_field)
      assessment, trace = assessment.of(rows), args.trace.name
    out = args.out or Path('results/assess') / Path(trace).stem
    out.mkdir(parents=True, exist_ok=True)
    measured = _measured(args.here, out)
    found = assess(assessment, trace, kind, args.workers, measured)
    about = environment([], None, started)
    made = finite({**asdict(found), 'environment': about})
    text = json.dumps(made, indent=2, allow_nan=False)
    (out / 'assessment.json').write_text(text + '\n')
    (out / 'operative_config.gin').write_text(operative)
    (out / 'report.html').write_text(assessment_page(found, operative, about))
    print(told(found))
    print(f'\nresults: {out}, open {out / "report.html"}')
  return 0


def _measured(here: str | None, out: Path) -> list[Measured]:
  """Now, or what was kept."""
  if here is None:
    return [read_measured(path) for path in sorted(KEPT.glob('*.json'))]
  experiment, _ = load(here, (), Experiment)
  measured = measure_here(experiment)
  write_measured(out / 'break_even.json', measured)
  return [measured]


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  add = parser.add_argument
  add('trace', nargs='?', type=Path, metavar='TRACE')
  add('--config', required=True, help='see configs/assess')
  add('--tokenizer', type=Path, help='a model folder, for logs with texts')
  add('--tenant-field', default='tenant', help='of a log; what separates it')
  add('--here', metavar='CONFIG', help='break-even here, measured first')
  add('--bind', action='append', default=[], metavar='X.y=z')
  add('--out', type=Path, help='default: results/assess/NAME')
  add('--workers', type=int, default=0, help='default: one a core')
  return parser


if __name__ == '__main__':
  sys.exit(main())

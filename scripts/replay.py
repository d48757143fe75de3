# SPDX-License-Identifier: Apache-2.0
"""Holds a simulation against a run on devices, request by request.

  python scripts/replay.py RESULTS [--costs X.gin] [--bind 'X.y=z']

RESULTS is the folder of a run whose workload is a trace. Its recorded events
are told to a fresh Conductor, which must decide the same; and its requests are
served in simulation, on what the costs say: those of the run, or others, best
of another run (`calibrate.py --served`). The exit status is 1 where a
recorded decision is not repeated.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
import operator
from pathlib import Path
import sys
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from mooncake_jax.costs.model import CostModel
from mooncake_jax.metrics.latency import intervals
from mooncake_jax.report.records import read_journal
from mooncake_jax.report.records import read_records
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.request import RequestRecord
from mooncake_jax.serve import Decision
from mooncake_jax.serve import Journal
from mooncake_jax.serve import replay
from scripts.config import load
from scripts.errors import one_line_errors
from scripts.experiment import Experiment
from scripts.serving import backends
from scripts.serving import conductor_of
from scripts.serving import prepare
from scripts.serving import serve_once
from scripts.workloads import Prepared

PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Comparison:
  """A measured run beside its simulation, requests in the same order.

  Attributes:
    decided, repeated: what the run's Conductor decided, and what a fresh one
      does when it is told the same.
  """

  measured: list[RequestRecord]
  simulated: list[RequestRecord]
  decided: list[Placement | Rejection]
  repeated: list[Placement | Rejection]

  @property
  def num_repeated(self) -> int:
    return sum(map(operator.eq, self.decided, self.repeated))

  @property
  def placed_alike(self) -> float:
    """Share of the requests that the simulation placed on the same pair."""
    pairs = zip(self.measured, self.simulated, strict=True)
    alike = [(a.prefill, a.decode) == (b.prefill, b.decode) for a, b in pairs]
    return sum(alike) / len(alike)

  @property
  def reused_tokens(self) -> tuple[int, int]:
    """Measured and simulated, of all requests."""
    return _reused(self.measured), _reused(self.simulated)

  def quantiles(self) -> dict[str, tuple[float, float]]:
    """Measured and simulated seconds by 'TTFT P50', …"""
    found = {}
    for name, take in (('TTFT', ttfts_s), ('TBT', tbts_s)):
      sides = take(self.measured), take(self.simulated)
      for percent in PERCENTS:
        measured_s, simulated_s = (np.percentile(s, percent) for s in sides)
        found[f'{name} P{percent}'] = float(measured_s), float(simulated_s)
    return found


def ttfts_s(records: Sequence[RequestRecord]) -> list[float]:
  """Of all requests that have a first token."""
  return [
    record.first_token_s - record.arrival_s
    for record in records
    if record.first_token_s is not None
  ]


def tbts_s(records: Sequence[RequestRecord]) -> list[float]:
  """Every interval between two tokens of a request."""
  found: list[float] = []
  for record in records:
    seconds, counts = intervals(record.segments)
    found += seconds.repeat(counts).tolist()
  return found


def compare(
  experiment: Experiment,
  records: list[RequestRecord],
  journal: Journal,
  costs: CostModel,
) -> Comparison:
  """Replays a run's decisions, and simulates its requests with `costs`.

  Raises:
    ValueError: its requests can't be made again from its workload.
  """
  config = experiment.model.read_config()
  prepared = prepare(experiment, config)
  _check(prepared, records)
  decided = [entry.decision for entry in journal if isinstance(entry, Decision)]
  repeated = replay(
    journal, prepared.requests, conductor_of(experiment, config)
  )
  virtual = replace(
    experiment, backend='virtual', costs=costs, truth=costs, store=None
  )
  with backends(virtual, config) as make_backend:
    simulated = serve_once(virtual, config, prepared, make_backend())
  by_name = {record.request_id: record for record in simulated.records}
  return Comparison(
    records, [by_name[r.request_id] for r in records], decided, repeated
  )


def _check(prepared: Prepared, records: Sequence[RequestRecord]) -> None:
  made = {request.request_id for request in prepared.requests}
  if prepared.follow_up is not None or made != {r.request_id for r in records}:
    raise ValueError(
      f'the workload makes {len(made)} requests of their own accord, the '
      f'run had {len(records)}: only traces can be replayed'
    )


def _reused(records: Sequence[RequestRecord]) -> int:
  return sum(sum(record.reused_tokens.values()) for record in records)


def table(comparison: Comparison) -> Table:
  """Quantiles side by side."""
  made = Table(title='On devices and simulated', title_justify='left')
  for column in ('', 'measured', 'simulated', 'error'):
    made.add_column(column, justify='right' if column else 'left')
  for name, (measured_s, simulated_s) in comparison.quantiles().items():
    error = simulated_s / measured_s - 1
    cells = (f'{measured_s:.4f} s', f'{simulated_s:.4f} s', f'{error:+.1%}')
    made.add_row(name, *cells)
  measured, simulated = comparison.reused_tokens
  made.add_row('reused tokens', f'{measured}', f'{simulated}', '')
  made.add_row('placed alike', '', f'{comparison.placed_alike:.3f}', '')
  return made


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('results', type=Path)
  parser.add_argument('--costs', type=Path, help='a gin file of costs')
  parser.add_argument(
    '--bind', action='append', default=[], metavar='X.y=z', help='comes last'
  )
  args = parser.parse_args(argv)
  with one_line_errors():
    comparison = of_folder(args.results, args.costs, args.bind)
  Console(width=100).print(table(comparison))
  total, same = len(comparison.decided), comparison.num_repeated
  print(f'recorded decisions repeated: {same} of {total}')
  return 0 if same == total else 1


class Folder:
  """A run's results, to be compared with one simulation or another.

  Raises as the loader does where the folder is not one.
  """

  def __init__(self, results: Path, bind: Sequence[str] = ()):
    self.run = results / 'operative_config.gin'
    self.experiment, _ = load(self.run, bind, Experiment)
    self.records = read_records(results / 'records.jsonl')
    self.journal = read_journal(results / 'events.jsonl')

  def compare(self, costs: CostModel) -> Comparison:
    """As `compare`."""
    return compare(self.experiment, self.records, self.journal, costs)

  def costs(self, path: Path) -> CostModel:
    """What this run would believe with a gin file of other costs."""
    both = [f"include '{each.resolve()}'\n" for each in (self.run, path)]
    with TemporaryDirectory() as folder:
      with_costs = Path(folder) / 'with_costs.gin'
      with_costs.write_text(''.join(both))
      return load(with_costs, (), Experiment)[0].costs


def of_folder(
  results: Path, costs: Path | None = None, bind: Sequence[str] = ()
) -> Comparison:
  """`compare` of a results folder; raises as it and the loader do."""
  folder = Folder(results, bind)
  believed = folder.costs(costs) if costs else folder.experiment.costs
  return folder.compare(believed)


if __name__ == '__main__':
  sys.exit(main())

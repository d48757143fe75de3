# SPDX-License-Identifier: Apache-2.0
"""Measures this machine and writes the cost model that the Conductor needs.

  python scripts/calibrate.py [--config RUN.gin] [--out configs/hardware/X.gin]
  python scripts/calibrate.py --served RESULTS --out X.gin

Times chunks, decode steps and transfers on the run file's cluster, each
alone, fits the polynomials of `costs/model.py` and writes a gin file. `--points
FILE.csv` leaves what was measured for `costs.table.load_table`. With
`--served`, chunks and decode steps are those of a run on devices, which disturb
each other as they do in serving; links stay what that run believed.
"""

import argparse
from dataclasses import asdict
from datetime import date
from pathlib import Path
import platform
import sys

from mooncake_jax.backend import Backend
from mooncake_jax.costs import fit
from mooncake_jax.costs.model import Link
from mooncake_jax.costs.model import LINKS
from mooncake_jax.costs.model import PolynomialCost
from mooncake_jax.costs.observed import observed
from mooncake_jax.costs.points import Lane
from mooncake_jax.costs.points import Points
from mooncake_jax.costs.points import write_points
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.report.records import read_journal
from mooncake_jax.report.records import read_records
from scripts import measure
from scripts.config import load
from scripts.errors import one_line_errors
from scripts.experiment import Experiment
from scripts.serving import backends

TEMPLATE = """# Costs: {config}, measured {date} on
# {machine}, {how}.
# Mean error of the fit: prefill {prefill:.0%}, decode {decode:.0%}.
#
#   python scripts/calibrate.py {source} \\
#     --out {out}
from __gin__ import dynamic_registration
import mooncake_jax.costs.model as costs
import scripts.experiment as experiment

experiment.Experiment.costs = @costs.PolynomialCost()
{bindings}
"""


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('--config', default='configs/run/quickstart.gin')
  parser.add_argument(
    '--out', type=Path, default=Path('configs/hardware/cpu.gin')
  )
  parser.add_argument('--served', type=Path, metavar='RESULTS')
  parser.add_argument(
    '--points', type=Path, help='leave what was measured in a CSV file, too'
  )
  parser.add_argument('--bind', action='append', default=[], metavar='X.y=z')
  args = parser.parse_args(argv)
  with one_line_errors():
    if args.served:
      if args.points:
        raise ValueError(f'{args.points}: --served has no works alone')
      run = args.served / 'operative_config.gin'
      experiment, _ = load(run, args.bind, Experiment)
      fits = calibrate_served(experiment, args.served)
      how, source = 'in a served run', f'--served {args.served}'
    else:
      experiment, _ = load(args.config, args.bind, Experiment)
      config = experiment.model.read_config()
      with backends(experiment, config) as make_backend:
        points = measured(experiment, config, make_backend())
      fits = fits_of(points)
      if args.points:
        write_points(args.points, lane_of(experiment), points)
      how, source = 'each work alone', f'--config {args.config}'
    args.out.write_text(to_gin(experiment, fits, how, source, args.out))
  print(
    f'{args.out}: {", ".join(f"{k} {f.mape:.0%}" for k, f in fits.items())}'
  )
  return 0


def measured(
  experiment: Experiment, config: ModelConfig, backend: Backend
) -> Points:
  """Times of chunks, steps and transfers, each alone."""
  spec = experiment.cluster
  layout, most = spec.layout(config), spec.max_request_tokens(config)
  prefill = list(measure.prefill_samples(backend, spec, layout, most))
  decode = list(measure.decode_samples(backend, spec, layout, most))
  links: dict[Link, list[fit.LinkSample]] = {}
  for link, sample in measure.link_samples(backend, spec, layout):
    links.setdefault(link, []).append(sample)
  return Points(prefill, decode, links)


def fits_of(points: Points) -> dict[str, fit.Fit]:
  """Fits by name: 'prefill', 'decode' and the links."""
  prefill, decode, links = points
  fits = {'prefill': fit.fit_prefill(prefill), 'decode': fit.fit_decode(decode)}
  return fits | {
    link: fit.fit_link(links[link], link) for link in LINKS if link in links
  }


def lane_of(experiment: Experiment) -> Lane:
  """What all points measured here have in common."""
  return Lane(
    platform.machine(),
    experiment.model.path or 'random weights',
    experiment.cluster.tensor_parallel,
    'mooncake_jax',
  )


def calibrate_served(
  experiment: Experiment, results: Path
) -> dict[str, fit.Fit]:
  """Fits by name of a results folder's chunks and steps, links as believed.

  Raises:
    ValueError: it has too few of them, or believed in no `PolynomialCost`.
  """
  costs = experiment.costs
  if not isinstance(costs, PolynomialCost):
    raise ValueError(f'{results}: Experiment.costs={costs} has no line a link')
  records = read_records(results / 'records.jsonl')
  found = observed(
    read_journal(results / 'events.jsonl'),
    {record.request_id: record.prompt_tokens for record in records},
    experiment.cluster.decode_names,
  )
  links = {
    name: value
    for name, value in asdict(costs).items()
    if not name.startswith(('prefill', 'decode'))
  }
  return {
    'prefill': fit.fit_prefill(found.prefill, noisy=True),
    'decode': fit.fit_decode(found.decode, noisy=True),
    'links': fit.Fit(links, 0.0, 0),
  }


def to_gin(
  experiment: Experiment,
  fits: dict[str, fit.Fit],
  how: str,
  source: str,
  out: Path,
) -> str:
  bindings = '\n'.join(
    f'costs.PolynomialCost.{name} = {value:.4g}'
    for found in fits.values()
    for name, value in found.coefficients.items()
  )
  return TEMPLATE.format(
    config=experiment.model.path or 'random weights',
    date=date.today().isoformat(),
    machine=f'{platform.system()} {platform.machine()}',
    prefill=fits['prefill'].mape,
    decode=fits['decode'].mape,
    how=how,
    source=source,
    out=out,
    bindings=bindings,
  )


if __name__ == '__main__':
  sys.exit(main())

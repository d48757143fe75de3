# SPDX-License-Identifier: Apache-2.0
"""Measures this machine and writes the cost model that the Conductor needs.

  python scripts/calibrate.py [--config RUN.gin] [--out configs/hardware/X.gin]

Times chunks, decode steps and transfers on the run file's cluster, each
alone, fits the polynomials of `costs/model.py` and writes a gin file.
"""

import argparse
from datetime import date
from pathlib import Path
import platform
import sys

from mooncake_jax.backend import Backend
from mooncake_jax.costs import fit
from mooncake_jax.costs.model import LINKS
from mooncake_jax.model_config import ModelConfig
from scripts import measure
from scripts.config import load
from scripts.errors import one_line_errors
from scripts.experiment import Experiment
from scripts.serving import backends

TEMPLATE = """# {title}: {config}, measured {date} on
# {machine}, each work alone.
# Mean error of the fit: prefill {prefill:.0%}, decode {decode:.0%}.
#
#   python scripts/calibrate.py --config {run} \\
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
  parser.add_argument('--bind', action='append', default=[], metavar='X.y=z')
  args = parser.parse_args(argv)
  with one_line_errors():
    experiment, _ = load(args.config, args.bind, Experiment)
    config = experiment.model.read_config()
    with backends(experiment, config) as make_backend:
      fits = calibrate(experiment, config, make_backend())
    args.out.write_text(to_gin(experiment, fits, args.config, args.out))
  print(
    f'{args.out}: {", ".join(f"{k} {f.mape:.0%}" for k, f in fits.items())}'
  )
  return 0


def calibrate(
  experiment: Experiment, config: ModelConfig, backend: Backend
) -> dict[str, fit.Fit]:
  """Fits by name: 'prefill', 'decode' and the links."""
  spec = experiment.cluster
  layout, most = spec.layout(config), spec.max_request_tokens(config)
  prefill = list(measure.prefill_samples(backend, spec, layout, most))
  decode = list(measure.decode_samples(backend, spec, layout, most))
  links = list(measure.link_samples(backend, spec, layout))
  fits = {'prefill': fit.fit_prefill(prefill), 'decode': fit.fit_decode(decode)}
  for link in LINKS:
    samples = [sample for name, sample in links if name == link]
    if samples:
      fits[link] = fit.fit_link(samples, link)
  return fits


def to_gin(
  experiment: Experiment, fits: dict[str, fit.Fit], run: str, out: Path
) -> str:
  bindings = '\n'.join(
    f'costs.PolynomialCost.{name} = {value:.4g}'
    for found in fits.values()
    for name, value in found.coefficients.items()
  )
  return TEMPLATE.format(
    title='Costs',
    config=experiment.model.path or 'random weights',
    date=date.today().isoformat(),
    machine=f'{platform.system()} {platform.machine()}',
    prefill=fits['prefill'].mape,
    decode=fits['decode'].mape,
    run=run,
    out=out,
    bindings=bindings,
  )


if __name__ == '__main__':
  sys.exit(main())

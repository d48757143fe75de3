# SPDX-License-Identifier: Apache-2.0
"""The highest rate at which a simulated cluster still keeps its SLOs.

  python scripts/capacity.py configs/run/sim_conversation.gin \\
    [--over 'ConductorSpec.policy=["random", "kvcache_centric"]'] \\
    [--target 0.9] [--tolerance 0.05] [--bind 'X.y=z'] [--out FILE.json]

Replays the run file's workload faster and slower, all arrivals squeezed or
stretched alike, until the rate is known within the tolerance at which the
target share of all offered requests is completed within both limits: the
goodput of DistServe, for both limits at once. One line a rate.
"""

import argparse
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import replace
import json
from pathlib import Path
import sys

from mooncake_jax.metrics.goodput import Goodput
from mooncake_jax.metrics.goodput import goodput
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.metrics.summary import Summary
from mooncake_jax.request import Request
from scripts.config import load
from scripts.errors import one_line_errors
from scripts.experiment import Experiment
from scripts.serving import backends
from scripts.serving import prepare
from scripts.serving import serve_once
from scripts.sweeps.grid import parse_axis
from scripts.sweeps.grid import points
from scripts.sweeps.grid import Sweep

HEAD = '  requests/s  of native  attainment  effective/s'


@dataclass(frozen=True)
class Capacity:
  """What a search found.

  Attributes:
    native_requests_per_s: the workload's own rate.
    instances: prefill and decode, a colocated pair being one.
    found: the rate, the next that failed, and every rate that was run.
  """

  native_requests_per_s: float
  instances: int
  found: Goodput

  @property
  def per_instance(self) -> float | None:
    """Requests per second of the rate found, a share of it for each."""
    rate = self.found.requests_per_s
    return None if rate is None else rate / self.instances


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  add = parser.add_argument
  add('config', help='a gin file, see configs/run')
  add('--over', metavar='X.y=[...]', help='one search for each value')
  add('--bind', action='append', default=[], metavar='X.y=z')
  add('--target', type=float, default=0.9, help='share of offered requests')
  add('--tolerance', type=float, default=0.05, help='of the rate')
  add('--max-scale', type=float, default=64.0, help='of the native rate')
  add('--out', type=Path, help='a JSON file')
  args = parser.parse_args(argv)
  with one_line_errors():
    capacities = {
      name: _search_and_tell(name, experiment, args)
      for name, experiment in _experiments(args).items()
    }
    if args.out:
      found = {name: asdict(capacity) for name, capacity in capacities.items()}
      args.out.write_text(json.dumps(found, indent=2) + '\n')
  return 0


def search(
  experiment: Experiment,
  target: float = 0.9,
  tolerance: float = 0.05,
  max_scale: float = 64.0,
  on_run: Callable[[float, Summary], None] = lambda rate, summary: None,
  start_scale: float = 1.0,
  step: float = 2.0,
  warmup: int = 0,
) -> Capacity:
  """Bisects the rate of a simulated experiment, see `metrics.goodput`.

  Args:
    max_scale: never faster than so many times the native rate, nor slower
      than one so-many-th of it.
    on_run: is told every rate and what it gave.
    start_scale: the first rate, of the native one.
    step: see `metrics.goodput`.
    warmup: so many of the first requests fill caches and do not count.

  Raises:
    ValueError: it runs on devices, or all requests arrive at once.
  """
  if experiment.backend != 'virtual':
    raise ValueError(
      f"Experiment.backend={experiment.backend!r} must be 'virtual': a search "
      'serves the workload many times'
    )
  config = experiment.model.read_config()
  prepared = prepare(experiment, config)
  native = requests_per_s(prepared.requests)

  def run_at_rate(rate: float) -> float:
    faster = at_rate(prepared.requests, rate)
    with backends(experiment, config) as make_backend:
      outcome = serve_once(
        experiment, config, replace(prepared, requests=faster), make_backend()
      )
    summary = outcome.summary
    if warmup:
      summary = summarize(outcome.records[warmup:], experiment.slo)
    on_run(rate, summary)
    return summary.effective_request_capacity

  found = goodput(
    run_at_rate,
    target,
    native * start_scale,
    tolerance,
    min_rate=native / max_scale,
    max_rate=native * max_scale,
    step=step,
  )
  return Capacity(native, experiment.num_nodes, found)


def requests_per_s(requests: Sequence[Request]) -> float:
  """Mean rate from the first arrival to the last.

  Raises:
    ValueError: they all arrive at once.
  """
  arrivals_s = [request.arrival_s for request in requests]
  if not arrivals_s or min(arrivals_s) == max(arrivals_s):
    raise ValueError(
      f'{len(arrivals_s)} requests at {set(arrivals_s)} s have no rate'
    )
  return (len(arrivals_s) - 1) / (max(arrivals_s) - min(arrivals_s))


def at_rate(requests: Sequence[Request], rate: float) -> list[Request]:
  """The same requests with all times between arrivals scaled to `rate`."""
  scale = rate / requests_per_s(requests)
  first_s = min(request.arrival_s for request in requests)
  return [
    replace(request, arrival_s=(request.arrival_s - first_s) / scale)
    for request in requests
  ]


def _experiments(args: argparse.Namespace) -> dict[str, Experiment]:
  if not args.over:
    return {args.config: load(args.config, args.bind, Experiment)[0]}
  sweep = Sweep(args.config, dict([parse_axis(args.over)]), tuple(args.bind))
  found = {}
  for point in points(sweep):
    name = ', '.join(f'{axis}={value}' for axis, value in point.values.items())
    found[name] = load(args.config, point.bindings, Experiment)[0]
  return found


def _search_and_tell(
  name: str, experiment: Experiment, args: argparse.Namespace
) -> Capacity:
  slo = experiment.slo
  print(f'{name}: TTFT <= {slo.ttft_s:g} s, TBT <= {slo.tbt_s:g} s\n{HEAD}')
  native: list[float] = []

  def tell(rate: float, summary: Summary) -> None:
    native.append(rate)  # The first run is at the native rate.
    print(
      f'{rate:12.4g}{rate / native[0]:11.3g}'
      f'{summary.effective_request_capacity:12.4f}'
      f'{summary.effective_per_s:13.4g}',
      flush=True,
    )

  capacity = search(
    experiment, args.target, args.tolerance, args.max_scale, tell
  )
  print(_verdict(capacity, args.target))
  return capacity


def _verdict(capacity: Capacity, target: float) -> str:
  rate, bound = (
    capacity.found.requests_per_s,
    capacity.found.bound_requests_per_s,
  )
  if rate is None:
    return f'  not even {bound:.4g} requests/s at {target:.0%}'
  above = 'the fastest tried' if bound is None else f'{bound:.4g} was too fast'
  return (
    f'  {rate:.4g} requests/s at {target:.0%}, {above}; '
    f'{capacity.per_instance:.4g} for each of {capacity.instances} instances'
  )


if __name__ == '__main__':
  sys.exit(main())

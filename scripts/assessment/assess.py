# SPDX-License-Identifier: Apache-2.0
"""One trace from its rows to the verdict."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
import time

from mooncake_jax.assess.assessed import Assessed
from mooncake_jax.assess.assessed import Simulated
from mooncake_jax.assess.break_even import assumed_spread
from mooncake_jax.assess.break_even import break_even
from mooncake_jax.assess.break_even import BreakEven
from mooncake_jax.assess.break_even import spread_of
from mooncake_jax.assess.measured import Measured
from mooncake_jax.assess.reuse import measure_reuse
from mooncake_jax.assess.reuse import Reuse
from mooncake_jax.assess.reuse import working_set
from mooncake_jax.assess.verdict import LITTLE
from mooncake_jax.assess.verdict import verdict
from mooncake_jax.assess.window import busiest
from mooncake_jax.blocks.accounting import kv_bytes
from mooncake_jax.costs.points import load_points
from mooncake_jax.costs.points import Points
from mooncake_jax.workload.scale import scale_trace
from mooncake_jax.workload.statistics import trace_statistics
from scripts.assessment.alternatives import groupings
from scripts.assessment.searches import Pool
from scripts.assessment.spec import Assessment
from scripts.assessment.spec import demand
from scripts.assessment.spec import enough
from scripts.assessment.spec import sized
from scripts.assessment.study import simulated
from scripts.assessment.study import Study
from scripts.fit_costs import held_out
from scripts.gin_source import find
from scripts.workloads import Rows
from scripts.workloads import TraceWorkload


def assess(
  assessment: Assessment,
  trace: str,
  trace_format: str,
  workers: int = 0,
  measured: Sequence[Measured] = (),
) -> Assessed:
  """Measures, simulates and weighs; takes minutes.

  Args:
    assessment: whose workload is the whole trace.
    trace, trace_format: how it is called.
    workers: processes; 0 is one a core.
    measured: break-evens to show beside the costs'.

  Raises:
    ValueError: the trace has fewer than two requests that the model takes.
  """
  began_s = time.monotonic()
  assessment, whole = _whole(assessment)
  points = _points(assessment)
  assessment = _with_error(assessment, points)
  nodes = sized(assessment, whole)
  number = enough(assessment, whole, nodes)
  assessment = replace(assessment, num_requests=number)
  first, part_rows = busiest(whole.rows, number)
  part = Rows(part_rows, [], whole.tokens_per_hash_id)
  duration_s = part_rows[-1].timestamp_s
  study = Study(assessment.of(part), nodes, whole, duration_s, Pool(workers))
  study.run()
  reuse = _reuse(assessment, whole)
  unused = reuse is None or reuse.hit_rate < LITTLE
  supposed = study.suppose() if unused else ()
  even = _break_even(assessment, points)
  of = simulated(assessment, nodes, first, part, _hit_rate(assessment, part))
  doubts = [
    *_doubts(assessment, of, len(whole.rows), reuse, points),
    *_unbounded(study, of),
  ]
  experiment = assessment.experiment
  config, dtype_bytes = (
    experiment.model.read_config(),
    experiment.cluster.kv_dtype_bytes,
  )
  return Assessed(
    experiment.title,
    trace,
    trace_format,
    tuple(whole.errors[:20]),
    trace_statistics(whole.rows, whole.tokens_per_hash_id),
    reuse,
    even,
    of,
    tuple(study.systems),
    study.sweeps,
    verdict(
      study.systems,
      reuse,
      even,
      assessment.least_gain,
      doubts,
      _facts(assessment, whole),
      supposed,
      0.99 * study.most_scale * of.requests_per_s,
    ),
    kv_bytes(config, 1, dtype_bytes),
    time.monotonic() - began_s,
    supposed,
    tuple(measured),
  )


def _whole(assessment: Assessment) -> tuple[Assessment, Rows]:
  """The whole trace, scaled as the config says; what is too long is told."""
  workload = assessment.experiment.workload
  assert isinstance(workload, TraceWorkload)
  rows = workload.rows
  read = rows if isinstance(rows, Rows) else Rows(rows, [])
  experiment = assessment.experiment
  model = experiment.model.read_config()
  most = experiment.cluster.max_request_tokens(model)
  fitting = [r for r in read.rows if r.input_tokens + r.output_tokens <= most]
  errors = list(read.errors)
  if too_long := len(read.rows) - len(fitting):
    errors.append(
      f'{too_long} requests are longer than {most} tokens: left out'
    )
  scaled = scale_trace(fitting, workload.scale, read.tokens_per_hash_id)
  if len(scaled.rows) < 2:
    raise ValueError(
      f'{len(scaled.rows)} requests are left: nothing to assess, must be >= 2'
      f'{"; " + errors[0] if errors else ""}'
    )
  whole = Rows(scaled.rows, errors, scaled.tokens_per_hash_id)
  plain = replace(workload, rows=whole, scale=type(workload.scale)())
  return replace(
    assessment, experiment=replace(experiment, workload=plain)
  ), whole


def _points(assessment: Assessment) -> Points | None:
  """Of the file's only lane."""
  if assessment.points is None:
    return None
  lanes = load_points(find(assessment.points))
  if len(lanes) != 1:
    raise ValueError(
      f'Assessment.points={assessment.points!r} has {len(lanes)} lanes, must '
      'be one'
    )
  return next(iter(lanes.values()))


def _with_error(assessment: Assessment, points: Points | None) -> Assessment:
  """Costs are off by what they were on points they had not seen."""
  if points is None:
    return assessment
  prefill, decode = held_out(points)
  unseen = max(float(prefill.mean()), float(decode.mean()))
  return replace(assessment, cost_error=unseen)


def _break_even(assessment: Assessment, points: Points | None) -> BreakEven:
  experiment = assessment.experiment
  spread = assumed_spread(assessment.noise)
  if points is not None:
    measured = spread_of(experiment.costs, points)
    spread = replace(measured, links={**spread.links, **measured.links})
  return break_even(
    experiment.model.read_config(),
    experiment.costs,
    experiment.cluster.kv_dtype_bytes,
    experiment.cluster.chunk_tokens,
    spread,
  )


def _reuse(assessment: Assessment, whole: Rows) -> Reuse | None:
  return measure_reuse(
    whole.rows,
    whole.tokens_per_hash_id,
    assessment.experiment.cluster.block_size_tokens,
  )


def _hit_rate(assessment: Assessment, part: Rows) -> float | None:
  if not all(row.hashed for row in part.rows):
    return None
  size = assessment.experiment.cluster.block_size_tokens
  return working_set(part.rows, part.tokens_per_hash_id, size).hit_rate


def _facts(assessment: Assessment, whole: Rows) -> list[str]:
  """What lengths and arrivals alone tell."""
  rows, of = whole.rows, demand(assessment, whole)
  span_s = max(rows[-1].timestamp_s - rows[0].timestamp_s, 1e-3)
  minutes = Counter(int(row.timestamp_s // 60) for row in rows)
  peak = max(minutes.values()) / min(60.0, span_s)
  return [
    f'Load: {len(rows) / span_s:.3g} requests/s in the mean, {peak:.3g} in the '
    f'busiest minute. By the costs, without reuse, prefill keeps '
    f'{of.prefill:.2g} nodes busy and decode {of.decode:.2g}, in steps of 64 '
    f'rows. A store can save of prefill alone.'
  ]


def _unbounded(study: Study, of: Simulated) -> list[str]:
  """Who kept the limits at the fastest rate that was tried."""
  most = 0.99 * study.most_scale * of.requests_per_s
  names = [system.name for system in study.systems if system.rate >= most]
  if not names:
    return []
  return [
    f'The fastest rate tried, {most:.3g} requests/s, was none too fast for '
    f'{", ".join(names)}: take more requests (Assessment.num_requests) or '
    'fewer nodes to see their limits.'
  ]


def _doubts(
  assessment: Assessment,
  of: Simulated,
  num_requests: int,
  reuse: Reuse | None,
  points: Points | None,
) -> list[str]:
  """What the verdict rests on that may be otherwise."""
  found = [
    'Simulated, not measured: the simulator is off by '
    f'{assessment.simulator_error:.0%} where its costs are right, and these by '
    f'{assessment.cost_error:.1%} '
    + ('on points they were not fitted to' if points else '(by the config)')
    + '. So a gain counts only if it is one in all of the cases below.',
    f'A goodput is known to {assessment.tolerance:.0%}.',
  ]
  experiment = assessment.experiment
  fixed_s = experiment.costs.prefill_s(1, 0)
  if fixed_s > experiment.slo.tbt_s / 4:
    found.append(
      f'On these costs a chunk takes {1000 * fixed_s:.0f} ms whatever its '
      'size, which may be so of a whole prompt only: systems that chunk look '
      'worse than they are.'
    )
  if of.num_requests < num_requests:
    found.append(
      f'Simulated are {of.num_requests:,} of {num_requests:,} requests, the '
      f'busiest {of.duration_s / 60:.1f} minutes; faster rates squeeze these.'
    )
  found.append(
    f'The first {assessment.warmup:.0%} of them fill caches and do not count.'
  )
  if reuse and of.hit_rate is not None and reuse.hit_rate > of.hit_rate + 0.01:
    found.append(
      f'Caches are empty when that part begins: it could reuse '
      f'{of.hit_rate:.0%}, the whole trace {reuse.hit_rate:.0%}. So the store '
      'is worth more than is shown here.'
    )
  if not groupings(of.nodes, 1):
    found.append(
      'CPP is left out: a group has two prefill nodes or more, and there is '
      f'one of {of.nodes}.'
    )
  if reuse is not None:
    found.append(
      'Reuse within an id of the trace, and of answers that no later prompt '
      'shows, is not counted.'
    )
  return found

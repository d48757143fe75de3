# SPDX-License-Identifier: Apache-2.0
"""An assessment: the value that a file of configs/assess builds."""

from dataclasses import dataclass
from dataclasses import replace
import math
from typing import NamedTuple

from mooncake_jax.conductor.admission import ADMISSIONS
from mooncake_jax.costs.model import check_count
from mooncake_jax.costs.model import check_positive
from mooncake_jax.systems.vllm import VllmSpec
from scripts.experiment import Experiment
from scripts.workloads import Rows
from scripts.workloads import TraceWorkload

USUAL = 1000  # requests of a part


@dataclass(frozen=True)
class Assessment:
  """What is compared, on which hardware, and how well.

  Attributes:
    experiment: Mooncake as it would be run: model, costs, sizes of a node,
      conductor, limits. Its numbers of instances are chosen here; its
      workload is assessed where no trace is given.
    vllm: a coupled node; its number of instances is chosen here.
    nodes: of each system; None sizes them by the costs so that the workload's
      own rate takes about `utilisation` of them.
    utilisation: see nodes.
    num_requests: at most so many are simulated, the busiest of the trace; None
      takes 1,000, and more where these would end before limits show.
    warmup: share of these, the first ones, that fill caches and do not count.
    least_s: faster rates, at which the part would be shorter, are not tried.
    target: share of requests that must keep both limits.
    tolerance: of goodputs.
    least_gain: what counts as a gain.
    points: CSV of the measured times that the costs were fitted to, for what
      they are off and for P99; None takes `cost_error` and `noise`.
    cost_error: what costs are off by on points that they were not fitted to.
    noise: standard deviation of a work's logarithm.
    simulator_error: what times simulated on known costs are off besides.
    admission: the variant with early rejection.
    chunk_tokens: of the variant with CPP.

  Raises:
    ValueError: a value out of its range.
  """

  experiment: Experiment
  vllm: VllmSpec = VllmSpec()
  nodes: int | None = None
  utilisation: float = 0.7
  num_requests: int | None = None
  warmup: float = 0.3
  least_s: float = 40.0
  target: float = 0.9
  tolerance: float = 0.05
  least_gain: float = 0.1
  points: str | None = None
  cost_error: float = 0.05
  noise: float = 0.1
  simulator_error: float = 0.06
  admission: str = 'slo_predictive'
  chunk_tokens: int = 8192

  def __post_init__(self):
    check_count('Assessment.chunk_tokens', self.chunk_tokens)
    if self.num_requests is not None:
      check_count('Assessment.num_requests', self.num_requests)
    for name in (
      'target',
      'tolerance',
      'least_gain',
      'utilisation',
      'least_s',
    ):
      check_positive(f'Assessment.{name}', getattr(self, name))
    if not 0 <= self.warmup < 1:
      raise ValueError(f'Assessment.warmup={self.warmup} must be in [0, 1)')
    for name in ('cost_error', 'noise', 'simulator_error'):
      check_positive(f'Assessment.{name}', getattr(self, name), zero=True)
    if self.nodes is not None and self.nodes < 2:
      raise ValueError(f'Assessment.nodes={self.nodes} must be >= 2')
    if self.admission not in ADMISSIONS:
      raise ValueError(
        f'Assessment.admission={self.admission!r} is not one of '
        f'{", ".join(ADMISSIONS)}'
      )
    if not isinstance(self.experiment.workload, TraceWorkload):
      raise ValueError(
        f'Assessment.experiment.workload={self.experiment.workload!r} must be '
        'a TraceWorkload'
      )

  def of(self, rows: Rows) -> 'Assessment':
    """The same of other rows."""
    workload = self.experiment.workload
    assert isinstance(workload, TraceWorkload)
    experiment = replace(self.experiment, workload=replace(workload, rows=rows))
    return replace(self, experiment=experiment)


class Demand(NamedTuple):
  """Nodes that the rows' own rate would keep busy, by the costs.

  Prompts are counted as they are, without reuse, and decode in steps of 64
  rows.
  """

  prefill: float
  decode: float


def demand(assessment: Assessment, rows: Rows) -> Demand:
  """What the rows ask for."""
  costs, found = assessment.experiment.costs, rows.rows
  chunk = assessment.experiment.cluster.chunk_tokens
  span_s = max(found[-1].timestamp_s - found[0].timestamp_s, 1e-3)
  prefill_s = sum(costs.prompt_s(row.input_tokens, 0, chunk) for row in found)
  outputs = sum(row.output_tokens for row in found)
  mean = sum(row.input_tokens for row in found) // len(found)
  decode_s = outputs * costs.decode_step_s(64, 64 * mean) / 64
  return Demand(prefill_s / span_s, decode_s / span_s)


def sized(assessment: Assessment, rows: Rows) -> int:
  """Nodes for the rows' own rate, by the costs; at least 2."""
  if assessment.nodes is not None:
    return assessment.nodes
  busy = sum(demand(assessment, rows))
  return max(2, math.ceil(busy / assessment.utilisation))


def enough(assessment: Assessment, rows: Rows, nodes: int) -> int:
  """How many requests to simulate.

  At twice the rate that would keep all nodes busy they last `least_s`; four
  times the usual number at most.
  """
  if assessment.num_requests is not None:
    return assessment.num_requests
  span_s = max(rows.rows[-1].timestamp_s - rows.rows[0].timestamp_s, 1e-3)
  own, busy = len(rows.rows) / span_s, sum(demand(assessment, rows))
  wanted = 2 * own * nodes / max(busy, 1e-9) * assessment.least_s
  return max(USUAL, min(math.ceil(wanted), 4 * USUAL))

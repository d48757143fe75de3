# SPDX-License-Identifier: Apache-2.0
"""TBT and TTFT of nodes that only prefill or decode against ones that do both.

The conversation trace on 16 simulated nodes, the same deciders. Those that do
both have the chunk size that suits them best: most requests that keep the SLO,
of equal ones the least TTFT. The others' figures stand beside it.
"""

from collections.abc import Sequence

from mooncake_jax.metrics.summary import Summary
from scripts.benches.rows import Row
from scripts.config import load
from scripts.experiment import Experiment
from scripts.serving import serve_alone

APART = 'configs/run/sim_disaggregated.gin'
TOGETHER = 'configs/run/sim_colocated.gin'
CHUNKS, QUICK = (128, 256, 512, 1024, 2048), (256, 512, 1024)
MOST = 0.5  # of the other's P99 of TBT


def colocated(quick: bool) -> list[Row]:
  """P99 of TBT (FAST'25's), of the best of the other kind."""
  first = f'TraceScale.num_requests={500 if quick else 4000}'
  apart = simulate(APART, [first])
  together = {
    chunk: simulate(TOGETHER, [first, f'ClusterSpec.chunk_tokens={chunk}'])
    for chunk in (QUICK if quick else CHUNKS)
  }
  best = max(together, key=lambda chunk: suits(together[chunk]))
  rows = [*_rows('apart', apart)]
  for chunk, summary in together.items():
    rows += _rows(f'chunk_{chunk}', summary)
  found, other = apart.tbt_tail_s['p99'], together[best].tbt_tail_s['p99']
  assert found is not None and other is not None
  what = f'P99 of TBT, of chunks of {best}'
  ratio = found / other
  return [*rows, Row('colocated.tbt', ratio, 'ratio', what, MOST, at_most=True)]


def suits(summary: Summary) -> tuple[float, float]:
  """The larger the better."""
  return summary.effective_request_capacity, -(summary.ttft_s['mean'] or 0.0)


def simulate(run: str, bindings: Sequence[str]) -> Summary:
  """Serves a run file's workload once."""
  experiment, _ = load(run, bindings, Experiment)
  return serve_alone(experiment).summary


def _rows(name: str, summary: Summary) -> list[Row]:
  effective = f'{summary.effective_request_capacity:.3f} effective'
  return [
    Row(f'colocated.{name}.tbt_p50', summary.tbt_tail_s['p50'], 's'),
    Row(f'colocated.{name}.tbt_p99', summary.tbt_tail_s['p99'], 's', effective),
    Row(f'colocated.{name}.ttft_mean', summary.ttft_s['mean'], 's'),
  ]

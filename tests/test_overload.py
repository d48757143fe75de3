# SPDX-License-Identifier: Apache-2.0
"""Twice the load that a cluster can decode: who keeps most within the SLO."""

from scripts.config import load
from scripts.experiment import Experiment
from scripts.serving import Outcome
from scripts.serving import serve_alone


def overloaded(admission: str) -> Outcome:
  """Two minutes of the overload run at four times the load; another seed."""
  experiment, _ = load(
    'configs/run/sim_overload.gin',
    [
      'conversation.num_requests=700',
      'conversation.seed=3',
      'TraceScale.time_scale=4.0',
      'SLO.tbt_s=0.045',
      f"ConductorSpec.admission='{admission}'",
    ],
    Experiment,
  )
  return serve_alone(experiment)


def test_slo_predictive_keeps_most_within_the_slo():
  """Its second look sees the others' limits too, that of `load` does not."""
  mine, load_s = (
    overloaded('slo_predictive').summary,
    overloaded('load').summary,
  )
  print(mine.effective, load_s.effective)
  assert mine.effective > 1.1 * load_s.effective > 0
  assert mine.completed - mine.effective < 0.1 * mine.completed
  assert mine.rejected + mine.rejected_late + mine.completed == 700

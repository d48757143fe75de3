# SPDX-License-Identifier: Apache-2.0
"""Runs held against their simulation, and costs found in runs."""

from dataclasses import replace

import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import SPEC
from mooncake_jax.costs.fit import DecodeSample
from mooncake_jax.costs.fit import fit_decode
from mooncake_jax.costs.observed import observed
from mooncake_jax.report.records import read_journal
from mooncake_jax.report.records import read_records
from mooncake_jax.workload.generate import distinct_prompts
from mooncake_jax.workload.scale import TraceScale
from scripts import calibrate
from scripts import replay
from scripts.config import load
from scripts.experiment import Experiment
from scripts.running import run
from scripts.workloads import TraceWorkload
from tiny_experiment import tiny

ROWS = distinct_prompts(44, count=8, interval_s=0.05, output_tokens=6)
PROMPTS = TraceWorkload(ROWS, TraceScale())


def trace(backend: str) -> Experiment:
  return tiny(workload=PROMPTS, backend=backend)


@pytest.mark.parametrize('backend', ['virtual', 'device'])
def test_recorded_events_give_the_same_decisions(tmp_path, backend):
  experiment = trace(backend)
  run(experiment, '', tmp_path, with_page=False)
  found = replay.compare(
    experiment,
    read_records(tmp_path / 'records.jsonl'),
    read_journal(tmp_path / 'events.jsonl'),
    COSTS,
  )
  assert found.num_repeated == len(found.decided) == len(ROWS)
  if backend == 'virtual':  # the simulation of a simulation is itself
    assert found.simulated == found.measured
    assert found.placed_alike == 1.0
    assert all(a == b for a, b in found.quantiles().values())
  other = replace(found, repeated=found.repeated[1:] + found.repeated[:1])
  assert other.num_repeated < len(ROWS)


def test_a_simulations_costs_are_found_in_what_it_tells(tmp_path):
  """Fits to its chunks and steps are the costs that it was made with."""
  run(trace('virtual'), '', tmp_path, with_page=False)
  found = observed(
    read_journal(tmp_path / 'events.jsonl'),
    {
      r.request_id: r.prompt_tokens
      for r in read_records(tmp_path / 'records.jsonl')
    },
    SPEC.decode_names,
  )
  assert found.prefill and found.decode
  for chunk in found.prefill:
    seconds = COSTS.prefill_s(chunk.chunk_tokens, chunk.prefix_tokens)
    assert chunk.seconds == pytest.approx(seconds)
  for step in found.decode:
    seconds = COSTS.decode_step_s(step.batch_size, step.context_tokens)
    assert step.seconds == pytest.approx(seconds, rel=0.01)


def test_costs_of_a_served_run_are_believed_by_the_next(tmp_path, monkeypatch):
  run_file = tmp_path / 'operative_config.gin'
  run_file.write_text(RUN)
  experiment, operative = load(run_file, (), Experiment)
  results = tmp_path / 'results'
  run(experiment, operative, results, with_page=False)
  costs = tmp_path / 'found.gin'
  calibrate.main(['--served', str(results), '--out', str(costs)])
  assert replay.main([str(results), '--costs', str(costs)]) == 0
  believed = replay.of_folder(results, costs).quantiles()
  for measured_s, simulated_s in believed.values():
    assert simulated_s == pytest.approx(measured_s, rel=0.02)


def test_times_that_are_noisy_are_fitted_to_their_mean():
  """A step that was read late makes the next one short; both count."""
  rng = np.random.default_rng(0)
  samples = []
  for _ in range(2000):
    rows, context = int(rng.integers(1, 9)), int(rng.integers(10, 3000))
    late_s = rng.uniform(0, 0.9)
    true_s = COSTS.decode_step_s(rows, context)
    for share in (1 + late_s, 1 - late_s):
      samples.append(DecodeSample(rows, context, true_s * share))
  found = fit_decode(samples, noisy=True).coefficients
  biased = fit_decode(samples).coefficients
  true_s = COSTS.decode_step_s(4, 1500)
  assert _step_s(found, 4, 1500) == pytest.approx(true_s, rel=0.03)
  assert _step_s(biased, 4, 1500) < 0.7 * true_s


def _step_s(found, rows: int, context: int) -> float:
  return found['decode_base_s'] + (
    rows * found['decode_s_per_row']
    + context * found['decode_s_per_context_token']
  )


def test_a_run_of_other_requests_is_told(tmp_path):
  run(trace('virtual'), '', tmp_path, with_page=False)
  records = read_records(tmp_path / 'records.jsonl')
  with pytest.raises(ValueError, match='makes 8 requests.*the run had 7'):
    replay.compare(trace('virtual'), records[1:], [], COSTS)


RUN = """
from __gin__ import dynamic_registration
import mooncake_jax.cluster_spec as cluster_spec
import mooncake_jax.conductor.spec as conductor
import mooncake_jax.workload.generate as generate
import mooncake_jax.workload.scale as scale
import scripts.experiment as experiment
include 'configs/model/small_random.gin'
include 'configs/hardware/cpu.gin'
include 'configs/cluster/cpu_2p2d.gin'
include 'configs/conductor/cost_based.gin'
include 'configs/conductor/slo_cpu.gin'
include 'configs/workload/conversation.gin'
conductor.ConductorSpec.admission = 'none'
generate.conversation.num_requests = 60
scale.TraceScale.length_scale = 0.125
scale.TraceScale.max_prompt_tokens = 900
scale.TraceScale.max_output_tokens = 60
scale.TraceScale.too_long = 'cut'

experiment.Experiment.title = 'small'
"""

# SPDX-License-Identifier: Apache-2.0
"""Experiments, generation and calibration on simulated devices."""

import json

from lifecycle import COSTS
from lifecycle import MODEL
from mooncake_jax.costs.fit import Fit
from mooncake_jax.costs.model import LINKS
from mooncake_jax.costs.model import PolynomialCost
from mooncake_jax.costs.points import write_points
from mooncake_jax.costs.table import load_table
from scripts import calibrate
from scripts.config import load
from scripts.experiment import Experiment
from scripts.gin_source import ROOT
from scripts.running import run
from scripts.serving import backends
from tiny_experiment import tiny


def test_reuse_changes_times_and_no_token(tmp_path, capsys):
  outcomes = run(tiny(compare_reuse=True, show_answers=1), '', tmp_path)
  tokens = {
    name: {r.request_id: r.output_tokens for r in outcome.records}
    for name, outcome in outcomes.items()
  }
  assert tokens['reuse'] == tokens['no_reuse'] and len(tokens['reuse']) == 6
  assert outcomes['reuse'].summary.hit_rate
  assert outcomes['no_reuse'].summary.hit_rate == 0
  # The second run counts what it moved itself: it puts nothing.
  moved = [o.summary.link_bytes.get('into_host', 0) for o in outcomes.values()]
  assert moved[0] > moved[1] == 0
  assert all(o.summary.link_bytes['into_device'] for o in outcomes.values())
  printed = capsys.readouterr()
  assert 'no_reuse' in printed.out and '> a b c' in printed.out
  assert 'left out: chats.jsonl:3: not JSON' in printed.err
  for folder in (tmp_path, tmp_path / 'no_reuse'):
    assert json.loads((folder / 'summary.json').read_text())['completed'] == 6


def test_every_kind_of_work_is_measured_into_fits_and_a_table(tmp_path):
  with backends(tiny(), MODEL) as make_backend:
    points = calibrate.measured(tiny(), MODEL, make_backend())
  chunks, steps, links = points
  assert len(chunks) > 4 and len(steps) > 3
  assert {*links} == set(LINKS[:4])  # no SSD here
  transfers = [sample for samples in links.values() for sample in samples]
  assert all(s.seconds > 0 for s in (*chunks, *steps, *transfers))
  fits = calibrate.fits_of(points)
  assert {*fits} == {'prefill', 'decode', *LINKS[:4]}
  path = tmp_path / 'here.csv'
  write_points(path, calibrate.lane_of(tiny()), points)
  table = load_table(str(path), COSTS)
  assert all(table.prefill_s(x, L) > 0 for x, L, _ in chunks)
  assert all(table.decode_step_s(b, s) > 0 for b, s, _ in steps)


def test_a_calibration_is_written_as_a_config_that_loads(tmp_path):
  values = {name: 0.25 for name in PolynomialCost.__dataclass_fields__}
  fits = {'prefill': Fit(values, 0.1, 9), 'decode': Fit({}, 0.1, 9)}
  path = tmp_path / 'here.gin'
  path.write_text(calibrate.to_gin(tiny(), fits, 'alone', '--config x', path))
  run_file = tmp_path / 'run.gin'
  run_file.write_text(
    (ROOT / 'configs/run/sim_conversation.gin')
    .read_text()
    .replace('configs/hardware/a800_x8_llama70b.gin', str(path))
  )
  experiment, _ = load(run_file, (), Experiment)
  assert experiment.costs == PolynomialCost(**values)

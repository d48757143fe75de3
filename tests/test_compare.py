# SPDX-License-Identifier: Apache-2.0
"""How sure differences of runs are, and what configs differ in."""

from functools import partial
import re

import numpy as np
import pytest

from mooncake_jax.metrics.bootstrap import columns
from mooncake_jax.metrics.bootstrap import differences
from mooncake_jax.metrics.bootstrap import FIGURES
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenSegment
from mooncake_jax.slo import SLO
from scripts import compare
from scripts.sweeps import inline
from scripts.sweeps.grid import Sweep
from scripts.sweeps.sweep import run_sweep

LIMITS = SLO(1.0, 0.1)


def records(count, mean_s, seed=0, reused=0, known=True):
  ttfts_s = np.random.default_rng(seed).exponential(mean_s, count)
  return [
    RequestRecord(
      f'r{i}',
      100,
      float(i),
      outcome='completed',
      placed_s=float(i),
      prefill_done_s=i + ttft_s,
      first_token_s=i + ttft_s,
      finished_s=i + ttft_s + 1,
      reused_tokens={'local_host': reused},
      reuse_known=known,
      segments=[TokenSegment(i + ttft_s, 0.05, 10)],
    )
    for i, ttft_s in enumerate(ttfts_s.tolist())
  ]


def test_figures_are_those_of_a_summary():
  found = records(200, 0.8, reused=30)
  summary = summarize(found, LIMITS).to_dict()
  for name, statistic in FIGURES.items():
    first, _, rest = name.partition('.')
    wanted = summary[first][rest] if rest else summary[first]
    assert statistic(columns(found, LIMITS)) == pytest.approx(wanted), name


def test_reuse_that_nobody_can_know_is_no_figure():
  found = records(20, 0.8, known=False)
  assert summarize(found, LIMITS).hit_rate is None
  of = columns(found, LIMITS)
  assert 'hit_rate' not in differences([of], [of], draws=2)


def test_a_run_does_not_differ_from_itself():
  of = columns(records(100, 0.8), LIMITS)
  for each in differences([of], [of], draws=50).values():
    assert each.low == each.high == 0.0 and not each.is_sure


def test_intervals_cover_the_true_difference_about_as_often_as_they_say():
  covered = 0
  for seed in range(40):
    a = columns(records(150, 0.8, seed), LIMITS)
    b = columns(records(150, 1.0, 1000 + seed), LIMITS)
    each = differences([a], [b], draws=100, seed=seed)['ttft_s.mean']
    covered += each.low <= 0.2 <= each.high
  assert 32 <= covered <= 40


def test_the_same_requests_make_small_differences_sure():
  a = columns(records(300, 0.8), LIMITS)
  b = columns(records(300, 0.82), LIMITS)  # each 2.5 % later
  other = columns(records(300, 0.82, seed=5), LIMITS)
  assert differences([a], [b])['ttft_s.mean'].is_sure
  assert not differences([a], [other])['ttft_s.mean'].is_sure


def test_seeds_that_differ_widen_the_interval():
  def runs(means_s):
    return [
      columns(records(200, mean_s, seed), LIMITS)
      for seed, mean_s in enumerate(means_s)
    ]

  alike = differences(runs([1.0, 1.0]), runs([1.1, 1.1]))['ttft_s.mean']
  apart = differences(runs([1.0, 1.0]), runs([0.6, 1.6]))['ttft_s.mean']
  assert alike.is_sure and not apart.is_sure
  three = differences(runs([1.0]), runs([1.0, 1.0, 1.0]), draws=20)
  assert three['effective_request_capacity'].low <= 0
  with pytest.raises(ValueError, match='without requests'):
    differences([], runs([1.0]))


def test_systems_are_called_by_what_tells_them_apart():
  one, other = 'out/a/seed0,out/a/seed1', 'out/b/seed0,out/b/seed1'
  assert compare.labels([one, other]) == {one: 'a/seed0', other: 'b/seed0'}
  assert compare.labels(['out/x', 'y']) == {'out/x': 'x', 'y': 'y'}
  # As many parts as there are, and one more name than the first has.
  assert compare.labels(['x', 'y/x']) == {'x': 'x', 'y/x': 'y/x'}


def test_two_runs_tell_what_differs_in_config_and_in_result(tmp_path, capsys):
  few = ('generate.conversation.num_requests=60',)
  sweep = Sweep(
    'configs/run/sim_conversation.gin',
    {'ConductorSpec.policy': ['kvcache_centric', 'random']},
    few,
  )
  rows = run_sweep(sweep, tmp_path, partial(inline.run_points))
  folders = [str(tmp_path / row.point.name) for row in rows]
  out = ['--out', str(tmp_path / 'c.html')]
  assert compare.main([*folders, *out]) == 0
  told = capsys.readouterr().out
  differ = told.split('bindings that differ:')[1].split('\n\n')[0]
  assert re.search(
    r"ConductorSpec.policy: 'kvcache_centric' \| 'random'", differ
  )
  assert len(differ.strip().splitlines()) == 1
  assert 'effective_request_capacity' in told.split('of the bootstrap')[1]
  assert compare.main([folders[0], folders[0], *out]) == 0
  assert 'the same bindings' in capsys.readouterr().out

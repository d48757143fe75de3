# SPDX-License-Identifier: Apache-2.0
"""Recompute and fetch measured on devices, beside the closed form."""

from dataclasses import replace
import json

from hypothesis import given
from hypothesis import strategies as st
import pytest

from lifecycle import MODEL
from mooncake_jax.assess.break_even import formula_bytes_per_flop
from mooncake_jax.assess.break_even import formula_tokens
from mooncake_jax.assess.break_even import MEDIA
from mooncake_jax.assess.measured import Measured
from mooncake_jax.assess.measured import measured_even
from mooncake_jax.assess.measured import Trial
from mooncake_jax.report.codec import decode
from mooncake_jax.report.codec import encode
from mooncake_jax.report.measured import measured_section
from mooncake_jax.report.measured import told
from scripts.assessment import here
from scripts.config import load
from scripts.experiment import Experiment
from scripts.gin_source import ROOT
from tiny_experiment import tiny

ABOUT = {
  'started': '2026-01-01T00:00:00',
  'system': 'Linux',
  'machine': 'x86_64',
  'cpus': 2,
  'devices': ['cpu:0'],
  'commit': None,
}


def small(tmp_path, **cluster):
  experiment = tiny()
  sizes = {
    'decode_instances': 1,
    # As many pages as other tests have, whose programs are at hand.
    'prefill_pool_tokens': 128,
    'device_cache_tokens': 128,
    'ssd_bytes': 1 << 20,
    'ssd_url': f'file://{tmp_path}/ssd',
  }
  spec = replace(experiment.cluster, **{**sizes, **cluster})
  return replace(experiment, cluster=spec)


def trials(times):
  """Of {(source, prefix): seconds}, twice each; a fetch takes half."""
  return tuple(
    Trial(source, n, seconds, 0.0 if source == 'HBM' else seconds / 2)
    for (source, n), seconds in times.items()
    for _ in range(2)
  )


def measured(times):
  return Measured('made', MODEL, 'device', 4, 8, 1.0, trials(times), ABOUT)


def test_prompts_are_read_from_where_they_should_and_kept(tmp_path):
  found = here.measure_here(small(tmp_path), budget_s=0.0, repeats=2)
  counts = {}
  for trial in found.trials:
    key = (trial.source, trial.prefix_tokens)
    counts[key] = counts.get(key, 0) + 1
    is_read = trial.source not in ('recompute', 'HBM')
    assert trial.ttft_s > 0 and (trial.fetch_s > 0) == is_read
  sources = {'recompute': 4} | dict.fromkeys([*MEDIA][:-1], 2)
  assert counts == {
    (name, n): count for n in (8, 16, 32, 64) for name, count in sources.items()
  }
  assert not [*(tmp_path / 'ssd').iterdir()]  # nothing is left behind
  again = decode(json.loads(json.dumps(encode(found))), Measured)
  assert measured_even(again) == measured_even(found)
  assert 'by formula' in told(found, measured_even(found))


def test_break_even_is_where_times_cross():
  times = {('recompute', n): n * 0.1 for n in (8, 16, 32)}
  times |= {('HBM', n): 0.5 for n in (8, 16, 32)}
  times |= {('SSD', n): 1.0 + n * 0.01 for n in (8, 16, 32)}
  times |= {('DRAM', n): 9.0 for n in (8, 16, 32)}
  even = measured_even(measured(times))
  by_name = {medium.name: medium for medium in even.media}
  assert by_name['SSD'].tokens == by_name['SSD'].sure_tokens == 16
  assert by_name['DRAM'].tokens is None and by_name['HBM'].tokens == 8
  assert by_name['HBM'].bytes_per_s is None
  first, *_, last = even.lengths
  assert last.num_bytes == 2 * MODEL.num_layers * 32 * 4 * (
    MODEL.num_kv_heads * MODEL.head_dim
  )
  assert last.least_bytes_per_s == pytest.approx(last.num_bytes / 2.7)
  assert first.least_bytes_per_s == pytest.approx(first.num_bytes / 0.3)
  page = ''.join(measured_section(measured(times)))
  assert 'DRAM' in page and 'never' in page and page.count('<svg') == 1


def test_what_is_missing_is_named():
  with pytest.raises(ValueError, match="none with source='HBM'"):
    measured_even(measured({('recompute', 8): 1.0}))


@given(st.floats(1e-9, 1.0))
def test_the_formula_is_solved(ratio):
  tokens = formula_tokens(MODEL, ratio, 4)
  asked = formula_bytes_per_flop
  assert ratio >= asked(MODEL, tokens, 4) * (1 - 1e-9)
  assert not tokens or ratio < asked(MODEL, tokens - 1, 4) * (1 + 1e-9)


@pytest.mark.parametrize(
  'cluster,said',
  [
    ({'ssd_bytes': 0}, 'ssd_bytes=0'),
    ({'prefill_instances': 1}, 'prefill_instances=1'),
    ({'device_cache_tokens': 40}, 'device_cache_tokens=40'),
  ],
)
def test_a_cluster_that_cannot_be_measured_is_refused(tmp_path, cluster, said):
  with pytest.raises(ValueError, match=said):
    here.measure_here(small(tmp_path, **cluster))


@pytest.mark.parametrize('name', ['smollm2', 'random'])
def test_every_config_builds(name):
  path = ROOT / f'configs/assess/here/{name}.gin'
  experiment, _ = load(path, (), Experiment)
  assert here._checked(experiment, experiment.model.read_config())

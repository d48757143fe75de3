# SPDX-License-Identifier: Apache-2.0
"""What a Conductor learns of costs that are not what it believes."""

from dataclasses import replace

import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import make_conductor
from lifecycle import SPEC
from mooncake_jax.conductor.corrections import Settling
from mooncake_jax.serve import serve
from test_conductor_life import ask
from test_conductor_life import simulated


def test_a_straggler_is_found_out_and_avoided():
  """Predictions of its prefill grow to what it takes."""
  spec = replace(SPEC, prefill_instances=1)
  slow = replace(COSTS, prefill_s_per_token=4e-4)
  conductor = make_conductor(spec, correct=True)
  requests = [ask(f'r{i}', 80, 2, 0.2 * i) for i in range(60)]
  records, _ = serve(requests, conductor, simulated(spec, slow))
  first, last = records[0], records[-1]
  assert first.predicted_ttft_s is not None and first.ttft_s is not None
  assert first.predicted_ttft_s < 0.6 * first.ttft_s
  assert last.predicted_ttft_s == pytest.approx(last.ttft_s, rel=0.15)


def test_a_pace_is_right_soon_and_wavers_little_later():
  rng = np.random.default_rng(0)
  pace, found = Settling(True), []
  pace.join(0)
  for _ in range(400):
    pace.observe(0, 1.0, 2.0 * np.exp(0.3 * rng.normal()))
    found.append(pace.factor_I[0])
  assert found[9] == pytest.approx(2.0, rel=0.25)
  assert np.std(found[200:]) < 0.12  # a tenth of each error: 0.14
  assert np.mean(found[200:]) == pytest.approx(2.0, rel=0.1)


def test_what_is_learnt_of_a_pace_holds_for_all_that_wait():
  """Twenty that came at once, before it was known how slow the instance is."""
  spec = replace(SPEC, prefill_instances=1, decode_pool_tokens=4096)
  slow = replace(COSTS, prefill_s_per_token=4e-4)
  conductor = make_conductor(spec, correct=True, admission='none')
  requests = [ask(f'r{i}', 80, 2) for i in range(20)]
  requests.append(ask('late', 80, 2, 0.3))
  records, _ = serve(requests, conductor, simulated(spec, slow))
  first, late = records[10], records[-1]
  assert first.ttft_s and first.predicted_ttft_s and late.ttft_s
  assert first.predicted_ttft_s < 0.6 * first.ttft_s
  assert late.predicted_ttft_s == pytest.approx(late.ttft_s, rel=0.15)

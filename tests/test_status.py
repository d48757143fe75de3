# SPDX-License-Identifier: Apache-2.0
"""What the status page is told: true, whatever happened, and bounded."""

from dataclasses import replace
from itertools import pairwise
import json

import pytest

from fuzz import Trial
from mooncake_jax.gateway.status import figures
from mooncake_jax.gateway.status import fleet
from mooncake_jax.gateway.status import Lately
from mooncake_jax.gateway.status import life
from mooncake_jax.gateway.status import MOST_INSTANCES
from mooncake_jax.gateway.status import spans
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.request import RequestRecord
from mooncake_jax.serve import serve
from mooncake_jax.slo import SLO


def served(seed: int, on_event=None):
  """A random cluster under random load, and its requests' records."""
  trial = Trial(seed)
  told = on_event and (lambda event: on_event(trial, event))
  records, _ = serve(trial.requests, trial.conductor, trial.cluster, None, told)
  return trial, records


@pytest.mark.parametrize('seed', range(8))
def test_figures_are_those_of_a_summary(seed):
  trial, records = served(seed)
  lately = Lately()
  for record in records:
    lately.add(record)
  found, whole = (
    figures(lately.lives(), trial.slo),
    summarize(records, trial.slo),
  )
  outcomes = found.pop('outcomes')
  assert sum(outcomes.values()) == whole.offered
  assert all(n == getattr(whole, end) for end, n in outcomes.items())
  by_tier = found.pop('hit_rate_by_tier')
  assert sum((by_tier or {}).values()) == pytest.approx(whole.hit_rate or 0)
  assert found == {name: getattr(whole, name) for name in found}


@pytest.mark.parametrize('seed', range(8))
def test_spans_of_a_life_follow_each_other_to_its_end(seed):
  for record in served(seed)[1]:
    parts = spans(record, 0.0)
    assert all(start <= stop for _, start, stop in parts), record
    assert all(a[2] == b[1] for a, b in pairwise(parts)), record
    if parts:
      assert parts[0][1] == pytest.approx(record.placed_s, abs=1e-6)
      assert parts[-1][2] == pytest.approx(record.finished_s, abs=1e-6)


def test_what_runs_is_open_until_now():
  record = RequestRecord('r', 100, 1.0, placed_s=1.0, fetch_start_s=2.0)
  assert spans(record, 5.0) == [('queue', 1.0, 2.0), ('fetch', 2.0, 5.0)]
  assert life(record, 5.0)['end_s'] is None


@pytest.mark.parametrize('seed', range(4))
def test_a_fleet_is_told_at_any_moment(seed):
  kept = []

  def look(trial: Trial, event):
    view, master = trial.conductor.view, trial.cluster.master
    told = fleet(view, master.statistics().segments, event.time_s)
    assert json.loads(json.dumps(told)) == told
    decode = told['decode']
    assert decode['used_tokens'] <= decode['room_tokens']
    assert told['prefill']['queued'] == len(view.prefill)
    kept.append(told)

  trial, _ = served(seed, look)
  assert any(told['prefill']['queued'] for told in kept)
  assert {row['name'] for row in kept[0]['prefill']['busiest']} == {
    *trial.spec.prefill_names
  }


def test_of_many_instances_the_busiest_are_listed():
  trial = Trial(0)
  view = trial.conductor.view
  for i in range(500):
    view.join(f'more{i}', 'prefill')
  view.prefill.add('more7', 'a', 3.0, 0.0)
  told = fleet(view, (), 0.0)['prefill']
  assert told['instances'] > MOST_INSTANCES == len(told['busiest'])
  assert [p['name'] for p in told['busiest'] if p['queued']] == ['more7']
  assert told['queue_s'] == 3.0


def test_only_the_last_requests_are_kept():
  lately = Lately(most=3)
  records = [
    RequestRecord(str(i), 1, 0.0, outcome='rejected', finished_s=1.0)
    for i in range(10)
  ]
  for record in records[:4]:
    lately.add(record)
  assert [each['id'] for each in lately.lives()] == ['1', '2', '3']
  for record in records[4:6]:
    lately.add(replace(record))
  assert [each['id'] for each in lately.lives()] == ['3', '4', '5']


def test_nothing_ended_has_no_figures():
  found = figures([], SLO())
  assert found['offered'] == 0
  assert found['hit_rate_by_tier'] is None
  assert found['effective_request_capacity'] is None

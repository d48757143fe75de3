# SPDX-License-Identifier: Apache-2.0
"""What the status page is told: true, whatever happened, and bounded."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
import json
import re
import time

import pytest

from fuzz import Trial
from gateway_pieces import Running
from gateway_pieces import running
from lifecycle import COSTS
from lifecycle import make_virtual
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.gateway.board import FRESH_S
from mooncake_jax.gateway.limits import GatewaySpec
from mooncake_jax.gateway.measures import Measures
from mooncake_jax.gateway.status import figures
from mooncake_jax.gateway.status import fleet
from mooncake_jax.gateway.status import life
from mooncake_jax.gateway.status import MOST_INSTANCES
from mooncake_jax.gateway.status import spans
from mooncake_jax.gateway.tenants import Tenant
from mooncake_jax.gateway.tenants import Tenants
from mooncake_jax.gateway.watching import snapshot
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.request import RequestRecord
from mooncake_jax.serve import serve
from mooncake_jax.slo import SLO
from tiny_experiment import tiny


def served(seed: int, on_event=None):
  """A random cluster under random load, and its requests' records."""
  trial = Trial(seed)
  told = on_event and (lambda event: on_event(trial, event))
  records, _ = serve(trial.requests, trial.conductor, trial.cluster, None, told)
  return trial, records


def test_metrics_are_of_what_there_is_and_not_of_what_was():
  cluster, measures = make_virtual(), Measures(SLO())
  for lost in (None, 'prefill0'):
    if lost is not None:
      cluster.lose(lost)
    now = snapshot(cluster)
    page = measures.page(now, 0).decode()
    told = re.findall(r'store_used_bytes{.*segment="(\w+)"}', page)
    assert sorted(told) == sorted(use.name for use in now.segments)
  assert told == ['prefill1']


@pytest.mark.parametrize('seed', range(8))
def test_figures_are_those_of_a_summary(seed):
  trial, records = served(seed)
  lives = [life(record, 0.0) for record in records]
  found, whole = figures(lives, trial.slo), summarize(records, trial.slo)
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
  assert spans(record, 5.0) == [('queue', 1.0, 2.0), ('prefill', 2.0, 5.0)]
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


def test_nothing_ended_has_no_figures():
  found = figures([], SLO())
  assert found['offered'] == 0
  assert found['hit_rate_by_tier'] is None
  assert found['effective_request_capacity'] is None


SLOW = replace(COSTS, decode_base_s=0.2)
SECRET = 'xyzzy'


def served_slowly(tenants: Tenants | None = None):
  rules = ConductorSpec(admission='none')
  spec = GatewaySpec(model_name='tiny')
  return running(
    tiny(backend='virtual', costs=SLOW, gateway=spec, conductor=rules), tenants
  )


def ask(server: Running, max_tokens: int, key: str | None = None):
  body = {
    'model': 'tiny',
    'prompt': f'{SECRET} ' * 20,
    'max_tokens': max_tokens,
  }
  return server.post('/v1/completions', body, key)


def test_the_board_tells_what_runs_and_what_ended():
  with served_slowly() as server:
    ask(server, 2)
    with begun(server):
      time.sleep(1.0)
      status, headers, told = server.get('/status.json')
    assert status == 200 and headers['cache-control'] == 'no-store'
    ended, under_way = told['requests']
    assert (ended['outcome'], under_way['outcome']) == ('completed', 'running')
    assert ended['reused_tokens'] == {} and under_way['reused_tokens']
    assert under_way['spans'][-1][0] == 'decode' and told['running'] == 1
    assert 2 <= under_way['output_tokens'] <= 8
    assert told['recent']['outcomes'] == {'completed': 1}
    assert told['fleet']['decode']['rows'] == 1
    assert told['slo'] == {'ttft_s': 30.0, 'tbt_s': 0.1}
    assert SECRET not in json.dumps(told)
    until(lambda: server.made.driver.num_open == 0)
    time.sleep(FRESH_S)
    _, _, told = server.get('/status.json')
    assert [r['outcome'] for r in told['requests']] == [
      'completed',
      'cancelled',
    ]
    page = server.get('/')[2]
    assert 'recent.outcomes.cancelled' in page and SECRET not in page


@contextmanager
def begun(server: Running):
  """A stream whose client leaves at the end."""
  connection = server.connection()
  asked = {'model': 'tiny', 'prompt': f'{SECRET} ' * 20, 'stream': True}
  body = json.dumps({**asked, 'max_tokens': 60})
  headers = {'Content-Type': 'application/json'}
  connection.request('POST', '/v1/completions', body, headers)
  connection.getresponse().read(1)
  try:
    yield
  finally:
    connection.close()


def until(holds):
  deadline_s = time.monotonic() + 20
  while not holds():
    assert time.monotonic() < deadline_s
    time.sleep(0.02)


def test_a_tenant_sees_its_own_requests_and_an_operator_all():
  keys = {name: name * 16 for name in ('a', 'b', 'op')}
  tenants = Tenants(
    [
      (keys['a'], Tenant('a', 'salt a')),
      (keys['b'], Tenant('b', 'salt b')),
      (keys['op'], Tenant('op', 'salt op', is_operator=True)),
    ]
  )
  with served_slowly(tenants) as server:
    assert ask(server, 1)[0] == 401
    for name in 'aab':
      assert ask(server, 1, keys[name])[0] == 200
    assert server.get('/status.json')[0] == 401
    assert (
      server.get('/')[0] == 200
      and 'recent' not in server.get('/')[2].split('<script>')[0]
    )
    seen = {
      name: server.get('/status.json', key)[2] for name, key in keys.items()
    }
  assert {name: len(told['requests']) for name, told in seen.items()} == {
    'a': 2,
    'b': 1,
    'op': 3,
  }
  assert seen['a']['fleet'] is seen['b']['fleet'] is None
  assert seen['op']['fleet']['prefill']['instances'] == 2
  # A hit of b's would tell it of a's prompt.
  assert sum(seen['b']['recent']['hit_rate_by_tier'].values()) == 0


def test_a_question_that_fails_ends_nobody_but_its_asker():
  with served_slowly() as server:
    rows = server.made.driver.conductor.view.prefill.row
    row = rows.pop('prefill0')
    assert server.get('/status.json')[0] == 500
    rows['prefill0'] = row
    time.sleep(FRESH_S)
    assert server.get('/status.json')[0] == 200

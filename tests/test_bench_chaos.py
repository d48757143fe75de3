# SPDX-License-Identifier: Apache-2.0
"""What `bench.py chaos` makes of a run: whatever was lost is told."""

from dataclasses import replace

import pytest

from mooncake_jax.distributed.holdings import Holdings
from mooncake_jax.events import Failed
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenSegment
from scripts.benches import chaos_found
from scripts.benches.chaos_found import Found
from scripts.benches.chaos_load import Kill
from scripts.benches.plot import plot

RIGHT = {'t': (1, 2, 3)}
IDLE = Holdings(0, 0, {}, 20, 100, 1 << 28)


def record(number: int, at_s: float, tokens=(1, 2, 3), **kwargs):
  fields = {'outcome': 'completed', 'arrival_s': at_s, **kwargs}
  return RequestRecord(
    f'{number}.t',
    prompt_tokens=9,
    first_token_s=at_s + 0.1,
    finished_s=at_s + 0.2,
    segments=[TokenSegment(at_s + 0.1, 0.05, len(tokens))],
    output_tokens=[*tokens],
    **fields,
  )


def clean(away_s: tuple[float, float] = (0.0, 0.0)) -> Found:
  """60 s of 5 requests/s; none is served in a time."""
  now_s = [0.0]
  found = Found(RIGHT, lambda: now_s[0], 60.0, 30.0)
  for number in range(300):
    now_s[0] = number / 5 + 0.2
    served = not away_s[0] <= now_s[0] < away_s[1]
    outcome = 'completed' if served else 'cancelled'
    found.ended(record(number, number / 5, outcome=outcome))
  found.asked, found.kills = 300, [Kill(30.0, 'p'), Kill(50.0, 'd')]
  found.before = found.after = {'p': IDLE}
  return found


def missed(found: Found) -> list[str]:
  return [row.metric for row in chaos_found.rows(found) if not row.ok]


def test_recovery_is_when_goodput_is_back():
  assert chaos_found.recoveries_s(clean()) == [0.0, 0.0]
  first, second = chaos_found.recoveries_s(clean((30.0, 33.0)))
  # A window of 2 s in which 4 of 5 are served begins 0.4 s earlier.
  assert first == pytest.approx(2.6, abs=0.21) and second == 0.0
  slow = clean((50.0, 56.0))
  assert missed(slow) == ['chaos.recovery_s']
  never = chaos_found.recoveries_s(clean((50.0, 60.0)))
  assert never[1] == float('inf')


@pytest.mark.parametrize(
  ('metric', 'spoil'),
  [
    ('unaccounted', lambda f: replace(f, asked=301)),
    ('wrong', lambda f: f.ended(record(0, 60.0, (1, 2, 4)))),
    ('wrong', lambda f: f.ended(record(0, 60.0, (1, 2)))),
    ('late', lambda f: f.ended(record(0, 20.0))),
    ('leftovers', lambda f: replace(f, leftovers=['p: 3 works'])),
    (
      'new_threads',
      lambda f: replace(f, after={'p': IDLE._replace(num_threads=30)}),
    ),
    (
      'ended_twice',
      lambda f: (
        [f.heard(Failed(1.0, 'x', 0, 'p', 'why', True))] * 2
        and f.heard(Failed(1.0, 'x', 0, 'p', 'why', True))
      ),
    ),
  ],
)
def test_what_is_lost_or_kept_misses_its_target(metric, spoil):
  found = clean()
  assert not missed(found)
  num_asked = found.asked
  found = spoil(found) or found
  found.asked = max(num_asked, found.asked)
  wrong = {name for name in missed(found)} - {'chaos.unaccounted'}
  assert wrong == {f'chaos.{metric}'} - {'chaos.unaccounted'}
  if metric == 'unaccounted':
    assert missed(found) == ['chaos.unaccounted']


def test_a_kill_of_the_last_of_a_role_is_told():
  found = clean()
  found.kills = [Kill(t, 'prefill0') for t in (10.0, 20.0, 30.0)]
  found.lost_s = [('prefill1', 15.0), ('decode0', 25.0), ('prefill0', 10.1)]
  found.joined_s = [('prefill0', 12.0), ('prefill1', 22.0)]
  rows = {row.metric: row.value for row in chaos_found.rows(found)}
  assert rows['chaos.kills_of_the_last'] == 1


def test_goodput_is_drawn_over_time(tmp_path):
  rows = chaos_found.rows(clean((30.0, 33.0)))
  (curve,) = [row.curve for row in rows if row.curve]
  low = [at_s for at_s, per_s in curve.points if per_s < 3]
  assert low == [31.0, 33.0]
  assert curve.marks == (30.0, 50.0)
  plot(rows, tmp_path / 'goodput.svg')
  drawn = (tmp_path / 'goodput.svg').read_text()
  assert 'goodput' in drawn and drawn.count('stroke: #b03030') == 2

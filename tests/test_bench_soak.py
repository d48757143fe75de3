# SPDX-License-Identifier: Apache-2.0
"""A short soak leaks nothing, and what would leak misses its target."""

from dataclasses import replace

import pytest

from scripts.benches import soak
from scripts.benches.soak import Found
from scripts.benches.soak import Resources


def test_a_few_seconds_of_trouble_leave_nothing_behind():
  found = soak.run(2.4, round_s=0.8)
  rows = {row.metric: row for row in soak.rows(found)}
  del rows['soak.rss_rise']  # of a process that has just begun
  assert not {name: row for name, row in rows.items() if not row.ok}
  assert found.asked == found.outcomes.total() > 16
  assert found.outcomes['completed'] and found.trouble['cancels']
  assert sum(found.trouble[what] for what in ('lost', 'drained', 'wiped'))


def clean() -> Found:
  found = Found(seconds=60.0, asked=9)
  found.outcomes['completed'] = 9
  idle = Resources(0, 0, 20, 100, 1 << 30)
  found.before = found.after = idle
  found.rounds = [idle] * 9
  return found


def growing(found: Found) -> Found:
  """Eight MB a round, with noise in two of them."""
  found.rounds = [
    replace(
      r, rss_bytes=r.rss_bytes + i * (8 << 20) + (i in (5, 7)) * (9 << 20)
    )
    for i, r in enumerate(found.rounds)
  ]
  return found


def with_after(found: Found, **changes) -> Found:
  assert found.after is not None
  found.after = replace(found.after, **changes)
  return found


@pytest.mark.parametrize(
  ('metric', 'leak'),
  [
    ('pages', lambda found: with_after(found, pages=1)),
    ('block_bytes', lambda found: with_after(found, block_bytes=-8)),
    ('threads', lambda found: with_after(found, threads=21)),
    ('arrays', lambda found: with_after(found, arrays=101)),
    ('rss_rise', growing),
    ('unaccounted', lambda found: replace(found, asked=10)),
    ('ended_twice', lambda found: replace(found, ended_twice=1)),
    (
      'odd_failures',
      lambda found: replace(found, failures=type(found.failures)({'late': 1})),
    ),
  ],
)
def test_a_leak_misses_its_target(metric, leak):
  assert all(row.ok for row in soak.rows(clean()))
  missed = [row.metric for row in soak.rows(leak(clean())) if not row.ok]
  assert missed == [f'soak.{metric}']


def test_one_jump_of_memory_is_no_slope():
  found = clean()
  jumped = [
    replace(r, rss_bytes=r.rss_bytes + (64 << 20)) for r in found.rounds
  ]
  found.rounds[8] = jumped[8]
  assert all(row.ok for row in soak.rows(found))

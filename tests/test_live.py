# SPDX-License-Identifier: Apache-2.0
"""Requests that come while the loop runs, on simulated time at wall pace."""

from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
import threading
import time

import pytest

from lifecycle import COSTS
from lifecycle import LAYERS
from lifecycle import make_conductor
from lifecycle import make_request
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.arrivals import Live
from mooncake_jax.changes import Change
from mooncake_jax.cluster import Cluster
from mooncake_jax.events import Event
from mooncake_jax.events import TokensEmitted
from mooncake_jax.request import RequestRecord
from mooncake_jax.serve import serve
from mooncake_jax.sim.paced import PacedBackend

LIMIT_S = 20.0


@dataclass
class Heard:
  """What the loop told, and when it was told on the run's clock."""

  backend: PacedBackend
  events: list[tuple[float, Event]] = field(default_factory=list)
  records: dict[str, RequestRecord] = field(default_factory=dict)
  changed: threading.Condition = field(default_factory=threading.Condition)

  def event(self, event: Event) -> None:
    with self.changed:
      self.events.append((self.backend.now_s(), event))
      self.changed.notify()

  def record(self, record: RequestRecord) -> None:
    with self.changed:
      self.records[record.request_id] = record
      self.changed.notify()

  def tokens(self, name: str) -> list[tuple[float, TokensEmitted]]:
    return [
      (told_s, event)
      for told_s, event in self.events
      if isinstance(event, TokensEmitted) and (name, 0) in event.emitted.tries
    ]

  def until(self, holds) -> None:
    with self.changed:
      assert self.changed.wait_for(holds, LIMIT_S)


@contextmanager
def running(spec=SPEC):
  """A loop in a thread of its own; ends it, and what it returned is empty."""
  backend = PacedBackend(COSTS, LAYERS, partners=spec.partners)
  cluster, heard = Cluster(spec, MODEL, backend), Heard(backend)
  live, returned = Live(backend.wake), []
  thread = threading.Thread(
    target=lambda: returned.append(
      serve(
        live,
        make_conductor(spec),
        cluster,
        on_event=heard.event,
        keeps_journal=False,
        on_record=heard.record,
      )
    )
  )
  thread.start()
  try:
    yield live, heard, cluster
  finally:
    live.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
  assert returned == [([], [])]  # and everything added up


@pytest.mark.parametrize(
  'spec',
  [
    SPEC,
    replace(SPEC, colocated=True, streaming='chunks', max_decode_steps=32),
  ],
  ids=['apart', 'colocated'],
)
def test_a_request_is_served_at_the_pace_of_the_clock(spec):
  with running(spec) as (live, heard, _):
    time.sleep(0.05)
    begun_s = time.perf_counter()
    live.post(make_request('r', range(30), 20))
    heard.until(lambda: 'r' in heard.records)
    took_s = time.perf_counter() - begun_s
  record = heard.records['r']
  assert record.outcome == 'completed' and record.arrival_s >= 0.05
  assert record.finished_s is not None
  assert took_s >= record.finished_s - record.arrival_s - 1e-3
  told = heard.tokens('r')
  assert sum(event.emitted.segment.count for _, event in told) == 20
  assert len(told) > 5  # as they came, not all at the end
  for told_s, event in told:
    assert told_s >= event.emitted.segment.last_s - 1e-9


def test_a_client_that_goes_away_ends_its_request():
  with running() as (live, heard, cluster):
    live.post(make_request('gone', range(30), 90))
    heard.until(lambda: heard.tokens('gone'))
    live.post(Change(0.0, 'cancel', 'gone'))
    heard.until(lambda: 'gone' in heard.records)
    assert heard.records['gone'].outcome == 'cancelled'
  assert cluster.idle and not cluster.leaks()
  cluster.check()


def test_what_can_never_be_served_is_told_and_the_next_is_served():
  with running() as (live, heard, _):
    live.post(make_request('long', range(10), 10_000))
    live.post(make_request('short', range(10), 2))
    heard.until(lambda: len(heard.records) == 2)
  assert heard.records['long'].outcome == 'failed'
  assert 'max_output_tokens=10000' in heard.records['long'].reason
  assert heard.records['short'].outcome == 'completed'


@pytest.mark.parametrize('num_requests', [50])
def test_what_was_posted_before_the_end_is_served(num_requests):
  with running() as (live, heard, _):
    for i in range(num_requests):
      live.post(make_request(f'r{i}', range(5 + i % 7), 3))
  outcomes = {record.outcome for record in heard.records.values()}
  assert len(heard.records) == num_requests and outcomes == {'completed'}


def test_the_wait_begins_when_the_client_came_not_when_it_was_posted():
  with running() as (live, heard, _):
    time.sleep(0.1)
    live.post(make_request('r', range(30), 2), time.perf_counter() - 0.08)
    heard.until(lambda: 'r' in heard.records)
  record = heard.records['r']
  assert record.placed_s is not None and record.ttft_s is not None
  assert record.placed_s - record.arrival_s >= 0.08
  assert record.ttft_s >= 0.08

# SPDX-License-Identifier: Apache-2.0
"""Decode steps in closed form are the same as steps made one by one."""

from dataclasses import fields
from dataclasses import replace

import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import LAYERS
from lifecycle import LOOSE
from lifecycle import make_request
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.cluster import Cluster
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.events import KVArrived
from mooncake_jax.events import PrefillDone
from mooncake_jax.request import Emitted
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenSegment
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend

# Contexts matter: the last step of a work takes twice as long as the first.
STEEP = replace(COSTS, decode_s_per_context_token=5e-5)
TIGHT = replace(
  SPEC,
  decode_reserve='prompt',
  decode_pool_tokens=160,
  max_tokens=120,
  max_batch=6,
  max_decode_steps=32,
)


class Stepping(VirtualBackend):
  """The reference: a step is a call, and asks what it takes."""

  def __init__(self):
    super().__init__(STEEP, LAYERS)
    self._stopped: set[int] = set()
    # Of works under way: their begin, and what they made and did not tell.
    self._begun_s: dict[int, float] = {}
    self._made: dict[int, list[Emitted]] = {}
    self.steps = 0

  def decode(self, instance, batch, max_steps):
    work_id = next(self._ids)
    left = min(max_steps, *(row.remaining for row in batch.rows))
    self._begun_s[work_id], self._made[work_id] = self.now_s(), []
    self._step(work_id, batch, left, 0)
    return work_id

  def cancel(self, work_id):
    self._stopped.add(work_id)
    super().cancel(work_id)

  def progress(self):
    told = [self._told(work_id) for work_id in self._made]
    return [replace(each, done=False) for each in told if each.steps]

  def _told(self, work_id: int) -> Completion:
    steps, self._made[work_id] = self._made[work_id], []
    begun_s, now_s = self._begun_s[work_id], self.now_s()
    return Completion(work_id, 'completed', begun_s, now_s, steps=tuple(steps))

  def _step(self, work_id: int, batch: DecodeBatch, left: int, made: int):
    num_rows = len(batch.rows)
    context = sum(row.position + 1 for row in batch.rows) + num_rows * made
    stop_s = self.now_s() + STEEP.decode_step_s(num_rows, context)
    self._clock.at(stop_s, self._stepped, work_id, batch, left - 1, made + 1)

  def _stepped(self, work_id, batch, left, made) -> None:
    self.steps += 1
    step = TokenSegment(self.now_s(), 0.0, 1)
    self._made[work_id].append(Emitted(batch.tries, step))
    if left and work_id not in self._stopped:
      self._step(work_id, batch, left, made)
    else:
      self._done.append(self._told(work_id))
      del self._made[work_id]


def records_on(backend: VirtualBackend) -> list[RequestRecord]:
  """500 requests, some of them cancelled while others prefill or decode."""
  rng = np.random.default_rng(11)
  texts = [rng.integers(1, 50, 60) for _ in range(5)]
  requests = []
  for i in range(500):
    text = texts[rng.integers(5)][: rng.integers(3, 60)]
    prompt = np.concatenate([text, rng.integers(1, 50, rng.integers(1, 30))])
    output = int(rng.integers(1, 30))
    requests.append(make_request(f'r{i}', prompt, output, 0.012 * i))
  rules = ConductorSpec(admission='none', correct=False)
  conductor = Conductor(rules, TIGHT, MODEL, STEEP, LOOSE)
  cluster = Cluster(TIGHT, MODEL, backend)

  def cancel(event):
    """Whoever arrives two later, at work then or queued, and once itself."""
    if isinstance(event, PrefillDone | KVArrived):
      number = int(event.request_id[1:])
      if number % 9 == 0:
        cluster.cancel(f'r{number - 2}')
      if number % 31 == 0 and isinstance(event, KVArrived):
        cluster.cancel(event.request_id)

  records, _ = serve(requests, conductor, cluster, on_event=cancel)
  cluster.check()
  return records


def test_steps_in_closed_form_are_those_made_one_by_one():
  stepping = Stepping()
  slow, fast = records_on(stepping), records_on(VirtualBackend(STEEP, LAYERS))
  assert stepping.steps > 1000
  outcomes = [record.outcome for record in fast]
  assert sum(record.preemptions for record in fast) > 20
  assert outcomes.count('cancelled') > 20
  assert outcomes.count('completed') > 400
  assert max(s.count for r in fast for s in r.segments) > 10
  for ours, reference in zip(fast, slow):
    assert times(ours) == pytest.approx(times(reference), rel=1e-9)
    for field in fields(RequestRecord):
      if field.name != 'segments':
        a, b = (getattr(record, field.name) for record in (ours, reference))
        is_time = isinstance(a, float)
        assert a == (pytest.approx(b, rel=1e-9) if is_time else b), field.name


def times(record: RequestRecord) -> list[float]:
  return [s.token_s(i) for s in record.segments for i in range(s.count)]


def test_a_segment_ends_at_the_first_token_after_a_time():
  segment = TokenSegment(1.0, 0.5, 40, 0.01)
  for i in range(40):
    assert segment.until(segment.token_s(i)).count == i + 1
    assert segment.until(segment.token_s(i) + 0.2).count == min(i + 2, 40)
    rest = segment.without(i)
    assert rest.count == 40 - i
    assert rest.last_s == pytest.approx(segment.last_s)
    assert rest.first_s == segment.token_s(i)
  assert segment.until(-1.0).count == 1

# SPDX-License-Identifier: Apache-2.0
"""What a prompt's way consists of, on the virtual clock, in closed form."""

from dataclasses import replace

import pytest

from lifecycle import COSTS
from lifecycle import make_request
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.events import KVArrived
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import WorkDone
from mooncake_jax.metrics.prefill_split import mean_split
from mooncake_jax.metrics.prefill_split import prefill_splits
from mooncake_jax.metrics.prefill_split import stage_spans
from mooncake_jax.request import Placement
from mooncake_jax.serve import Journal
from mooncake_jax.sim.virtual import VirtualBackend


def journal_of(stages: tuple[int, ...], prompt=range(2, 50)) -> Journal:
  """Events of one prompt through a pipeline with these layers a stage."""
  spec = replace(SPEC, stages=len(stages), stage_layers=stages)
  backend = VirtualBackend(COSTS, stages)
  cluster = Cluster(spec, MODEL, backend)
  request = make_request('r', [*prompt])
  cluster.submit(request, Placement('r', 0, 'prefill0', 'decode0'))
  events: Journal = []
  while not cluster.idle:
    events += cluster.step(None)
  return events


@pytest.mark.parametrize('stages', [(3,), (1, 2), (1, 1, 1)])
def test_the_parts_of_a_prompt_add_up_to_its_time(stages):
  events = journal_of(stages)
  (parts,) = prefill_splits(events).values()
  (done,) = [e for e in events if isinstance(e, PrefillDone)]
  (arrived,) = [e for e in events if isinstance(e, KVArrived)]
  assert sum(parts) == pytest.approx(arrived.time_s - done.started_s)
  chunks = [e for e in events if isinstance(e, WorkDone) and e.step == 'chunk']
  seconds = sum(
    COSTS.prefill_s(e.stop_token - e.start_token, e.start_token) for e in chunks
  )
  assert parts.compute_s == pytest.approx(seconds / len(stages))
  assert parts.bubble_s >= -1e-9 and parts.kv_exposed_s > 0
  assert len(stage_spans(chunks)) == len(chunks) * len(stages)


def test_transfers_tell_their_bytes():
  moved = {
    e.step: e.num_bytes
    for e in journal_of((3,))
    if isinstance(e, WorkDone) and e.step != 'chunk'
  }
  assert moved.keys() == {'put', 'handoff'} and min(moved.values()) > 0


def test_nobody_served_has_no_split():
  assert mean_split([]) == {}

# SPDX-License-Identifier: Apache-2.0
"""A run that loses or makes up anything is an error that says what."""

from collections.abc import Callable

import pytest

from lifecycle import COSTS
from lifecycle import LAYERS
from lifecycle import make_conductor
from lifecycle import MODEL
from lifecycle import shared_prefix_requests
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Event
from mooncake_jax.events import Finished
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import PrefixFetched
from mooncake_jax.metrics.conservation import Conservation
from mooncake_jax.metrics.conservation import NotConserved
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenSegment
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend


def test_what_adds_up_is_said_nothing_about():
  balance = Conservation({('p', 'host'): 2})
  balance.took()
  record = RequestRecord('r', 10, 0.0, reused_tokens={'local_host': 4})
  record.segments = [TokenSegment(1.0, 0.1, 3)]
  balance.observe_store(BlocksStored(0.0, 'p', (b'a', b'b'), 'host', 3))
  done = PrefillDone(1.0, 'r', 0, 'p', computed_tokens=6)
  balance.computed(done)
  balance.observe_request(done, record)
  balance.observe_request(Finished(2.0, 'r', 0, 'd', 3), record)
  record.outcome = 'completed'
  balance.check([record], {('p', 'host'): 4}, [])


@pytest.mark.parametrize(
  ('event', 'said'),
  [
    (Finished(2.0, 'r', 0, 'd', 4), 'output tokens of r: 4 .* 3 are in its'),
    (
      PrefillDone(1.0, 'r', 0, 'p', computed_tokens=7),
      'prompt tokens of r: 4 reused and 7 computed .*, it has 10',
    ),
  ],
)
def test_tokens_that_do_not_add_up_are_named(event, said):
  balance = Conservation({})
  balance.took()
  record = RequestRecord('r', 10, 0.0, reused_tokens={'local_host': 4})
  record.segments = [TokenSegment(1.0, 0.1, 3)]
  balance.computed(event)
  balance.observe_request(event, record)
  record.outcome = 'completed'
  with pytest.raises(NotConserved, match=said):
    balance.check([record], {}, [])


def test_requests_without_an_end_and_leaks_are_named():
  balance = Conservation({})
  balance.took()
  with pytest.raises(NotConserved, match='requests: 1 came, 0 have records'):
    balance.check([], {}, [])
  with pytest.raises(NotConserved, match='1 have records, 1 of them no end'):
    balance.check([RequestRecord('r', 10, 0.0)], {}, ['pages: d'])


def _served(tamper: Callable[[Cluster, Event], None]) -> None:
  cluster = Cluster(SPEC, MODEL, VirtualBackend(COSTS, LAYERS))
  serve(
    shared_prefix_requests(12, every_s=0.01),
    make_conductor(SPEC),
    cluster,
    on_event=lambda event: tamper(cluster, event),
  )


def test_a_block_lost_without_a_word_fails_the_run():
  lost = []

  def lose(cluster: Cluster, event: Event) -> None:
    if isinstance(event, BlocksStored) and not lost:
      (replica,) = cluster.master.peek(event.keys[-1])
      lost.extend(cluster.master.discard(replica))

  with pytest.raises(NotConserved, match='blocks of prefill. .host.: '):
    _served(lose)
  assert lost


def test_a_page_lost_without_a_word_fails_the_run():
  def hold(cluster: Cluster, event: Event) -> None:
    if isinstance(event, PrefixFetched) and event.request_id == 'r0':
      cluster.decode['decode0'].pool.hold(1)

  with pytest.raises(NotConserved, match='pages: decode0 holds some'):
    _served(hold)

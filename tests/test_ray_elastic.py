# SPDX-License-Identifier: Apache-2.0
"""Processes that come, change and go while a cluster serves.

The decode instance spans two, which serve, and die, as one does.
"""

from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
import importlib.util
import os
from pathlib import Path
import signal
import time

import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import make_conductor
from lifecycle import make_request
from lifecycle import make_virtual
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import InstanceSizes
from mooncake_jax.conductor.roles import RoleRules
from mooncake_jax.events import Event
from mooncake_jax.events import Finished
from mooncake_jax.events import InstanceDraining
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import InstanceLost
from mooncake_jax.events import KVArrived
from mooncake_jax.events import PrefillDone
from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord
from mooncake_jax.serve import serve
from ray_pieces import one_process
from ray_pieces import RAY
from ray_pieces import ray_cluster
from ray_pieces import worker_specs

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('ray') is None, reason='Ray is not installed'
)
SMALL = replace(
  SPEC,
  decode_instances=1,
  instances={'decode0': InstanceSizes(tensor_parallel=2)},
  absent=('prefill1',),
  switchable=True,
)
SPANNING = replace(RAY, devices_per_process=1)
NOTICED_S = 5.0  # on a busy machine
CLIENTS, MOST = 3, 4000  # requests under way, and of a run
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(2, MODEL.vocab_size, 20 + i % 9) for i in range(12)]


@pytest.fixture(scope='module')
def expected():
  """The answer to each prompt, in one process."""
  with one_process(SMALL) as tokens:
    return tokens([ask(i) for i in range(len(PROMPTS))])


@pytest.fixture(scope='module')
def backend(expected):
  """One prefill and two decode processes; one more may come.

  They find their programs compiled, by the process that they are held against.
  """
  with ray_cluster(SMALL, SPANNING) as made:
    yield made


@pytest.fixture
def cluster(backend):
  backend.restart_clock()
  return Cluster(SMALL, MODEL, backend, costs=COSTS)


def ask(number: int, arrival_s: float = 0.0, output: int = 6) -> Request:
  prompt = PROMPTS[number % len(PROMPTS)]
  return make_request(f'{number}', prompt, output, arrival_s)


@dataclass
class Script:
  """Clients that ask one request after another until the steps are done.

  Each step is a verb of the cluster, called once an event of a kind has come
  from an instance since the last step.
  """

  cluster: Cluster
  steps: list[tuple[type, str, tuple[str, ...]]]
  told: list[Event] = field(default_factory=list)
  count: int = CLIENTS

  def on_event(self, event: Event) -> None:
    if isinstance(event, InstanceDraining | InstanceJoined | InstanceLost):
      self.told.append(event)
    if not self.steps:
      return
    kind, verb, args = self.steps[0]
    name = getattr(event, 'instance', '')
    if isinstance(event, kind) and (args[0] == name or kind is Finished):
      self.steps.pop(0)
      getattr(self.cluster, verb, lambda *_: None)(*args)

  def next_one(self, record: RequestRecord) -> Request | None:
    self.count += 1
    if not self.steps or self.count > MOST:
      return None
    return ask(self.count, self.cluster.backend.now_s())

  def run(self) -> list[RequestRecord]:
    conductor = make_conductor(SMALL, policy='random', admission='none')
    first = [ask(i) for i in range(CLIENTS)]
    records, _ = serve(
      first, conductor, self.cluster, self.next_one, self.on_event
    )
    assert not self.steps, f'{len(records)} requests and never: {self.steps}'
    self.cluster.check()
    return records


STEPS = [
  (Finished, 'join', ('prefill1',)),
  (PrefillDone, 'set_role', ('prefill1', 'decode')),
  (KVArrived, 'drain', ('prefill1',)),
  (InstanceLost, '', ('prefill1',)),
]


def test_an_instance_joins_changes_its_role_and_leaves(
  backend, cluster, expected
):
  """As in a simulation: the same is told, and every answer is right."""
  simulated = Script(make_virtual(SMALL), [*STEPS])
  simulated.run()
  script = Script(cluster, [*STEPS])
  records = script.run()
  assert [(type(e), e) for e in untimed(script.told)] == [
    (type(e), e) for e in untimed(simulated.told)
  ]
  joined = [e.role for e in script.told if isinstance(e, InstanceJoined)]
  assert joined == ['prefill', 'decode']
  assert {r.outcome for r in records} == {'completed'}
  assert not any(r.attempt for r in records)
  for record in records:
    number = f'{int(record.request_id) % len(PROMPTS)}'
    assert tuple(record.output_tokens) == expected[number]
  assert backend.crew.addresses.keys() == {'prefill0', 'decode0'}


def untimed(events: list[Event]) -> list[Event]:
  return [replace(event, time_s=0.0) for event in events]


def test_the_conductor_changes_a_role_where_it_may(backend, cluster):
  """Long answers to short prompts: a prefill instance of two decodes."""
  cluster.join('prefill1')
  arrived(cluster)
  process = Path(f'/proc/{backend.crew.process_ids["prefill1"]}')
  roles = RoleRules(gain=0.05, hold_s=0.1, rest_s=0.1, average_s=1.0)
  conductor = make_conductor(SMALL, admission='none', roles=roles)
  for event in cluster.inventories():
    conductor.observe(event)
  conductor.view.join('prefill1', 'prefill')
  told: list[Event] = []
  begun_s = cluster.backend.now_s()
  requests = [ask(i, begun_s + 0.05 * i, output=40) for i in range(40)]
  records, _ = serve(requests, conductor, cluster, on_event=told.append)
  assert {r.outcome for r in records} == {'completed'}
  joined = [e for e in told if isinstance(e, InstanceJoined)]
  assert joined and joined[0].role == 'decode'
  assert process.exists()  # a role is changed in place
  cluster.check()


def test_what_is_let_go_ends_also_while_it_starts(backend, cluster):
  """And comes when it is asked for again."""
  cluster.join('prefill1')
  cluster.drain('prefill1')
  until_s = time.monotonic() + 60
  while 'prefill1' in backend.crew._starters:
    assert time.monotonic() < until_s
    time.sleep(0.02)
  assert not backend.wait(backend.now_s()) and not backend.member_changes()
  cluster.join('prefill1')
  cluster.set_role('prefill1', 'decode')  # which it takes when it is there
  joined = arrived(cluster)
  assert (joined.instance, joined.role) == ('prefill1', 'decode')
  assert 'prefill1' in cluster.decode and 'prefill1' not in cluster.prefill
  process = Path(f'/proc/{backend.crew.process_ids["prefill1"]}')
  cluster.lose('prefill1')  # by whoever runs the cluster
  told = cluster.step(backend.now_s() + 0.1)
  assert [type(e) for e in told] == [InstanceLost]
  while process.exists():
    assert time.monotonic() < until_s
    time.sleep(0.02)
  with pytest.raises(ValueError, match="no instance 'prefill9'"):
    backend.bring('prefill9')


def test_an_instance_ends_with_any_of_its_processes(backend, cluster):
  leader = backend.crew.process_ids['decode0']
  (follower,) = followers_beside(leader)
  os.kill(follower, signal.SIGKILL)
  killed_s, told = time.monotonic(), []
  while not told:
    assert time.monotonic() < killed_s + NOTICED_S
    told += cluster.step(backend.now_s() + 0.1)
  assert [(type(e), e.instance) for e in told] == [(InstanceLost, 'decode0')]
  backend.dismiss('decode0')  # or it would be started anew
  while Path(f'/proc/{leader}').exists():
    assert time.monotonic() < killed_s + NOTICED_S
    time.sleep(0.02)


@pytest.mark.parametrize(
  'fields, most, wanted',
  [
    ({'stages': 3}, 1, 'only an instance of one stage'),
    ({'tensor_parallel': 3}, 2, 'must divide the 3 devices of prefill0'),
  ],
)
def test_what_cannot_span_processes_is_refused(fields, most, wanted):
  spec = replace(SPANNING, devices_per_process=most)
  with pytest.raises(ValueError, match=wanted):
    worker_specs(replace(SPEC, **fields), spec)


def followers_beside(leader: int) -> list[int]:
  """Processes of the same node that follow some other."""
  return [
    int(path.name)
    for path in Path('/proc').glob('[0-9]*')
    if words(path / 'cmdline').startswith('ray::FollowerActor')
    and parent(int(path.name)) == parent(leader)
  ]


def parent(process: int) -> int | None:
  fields = words(Path(f'/proc/{process}/stat')).rpartition(') ')[2].split()
  return int(fields[1]) if fields else None


def words(path: Path) -> str:
  """What it says of a process; nothing of one that is no more."""
  try:
    return path.read_text()
  except OSError:
    return ''


def arrived(cluster: Cluster) -> InstanceJoined:
  """Waits until an instance has come."""
  told, until_s = [], cluster.backend.now_s() + 60
  while not (joined := [e for e in told if isinstance(e, InstanceJoined)]):
    told += cluster.step(cluster.backend.now_s() + 0.5)
    assert cluster.backend.now_s() < until_s, told
  return joined[0]

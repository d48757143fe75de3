# SPDX-License-Identifier: Apache-2.0
"""A small cluster of processes, and what is left in them."""

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
import gc
import os
import signal
from typing import Any
from typing import TYPE_CHECKING
import warnings

import jax
import numpy as np

from engine_pieces import MODEL
from engine_pieces import tiny_params
from lifecycle import close
from lifecycle import make_conductor
from lifecycle import make_device
from lifecycle import SPEC
from mooncake_jax.blocks.segments import medium
from mooncake_jax.cluster import Cluster
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.token import require_token
from mooncake_jax.distributed.worker import StoreSource
from mooncake_jax.distributed.worker import WorkerSpec
from mooncake_jax.events import Event
from mooncake_jax.events import InstanceLost
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from mooncake_jax.serve import Decision
from mooncake_jax.serve import serve
from scripts.device import instance_specs
from scripts.device import start_jax
from scripts.ray_cluster import processes_of

if TYPE_CHECKING:  # told of its token first
  from mooncake_jax.distributed.backend import RayBackend

SMALL = replace(SPEC, prefill_instances=1, decode_instances=1)
RAY = RaySpec(silence_s=6.0, max_restarts=99)
Tokens = dict[str, tuple[int, ...]]
BACK_S = 90.0  # for a process to start, on a machine with much else to do


@contextmanager
def ray_cluster(
  cluster=SPEC, spec: RaySpec = RAY, store: StoreSource | None = None
) -> Iterator['RayBackend']:
  """Each instance that is not absent in a process; ends them."""
  require_token()
  from mooncake_jax.distributed.backend import RayBackend

  layout, workers = cluster.layout(MODEL), worker_specs(cluster, spec, store)
  with RayBackend(layout, workers, spec, absent=cluster.absent) as made:
    yield made
  # Ray does not wait for the processes that it ends.
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', ResourceWarning)
    gc.collect()


def worker_specs(
  cluster=SPEC, spec: RaySpec = RAY, store: StoreSource | None = None
) -> list[WorkerSpec]:
  instances = instance_specs(cluster, MODEL)
  names = [instance.name for instance in instances]
  params = jax.tree.map(np.asarray, tiny_params())
  return [
    WorkerSpec(
      MODEL,
      cluster.layout(MODEL),
      instance,
      tuple(name for name in names if name != instance.name),
      params,
      'float32',
      WireSpec('tcp', checksums=True, stall_s=2.0),
      'secret',
      # As many as in the tests' process: so what that has compiled is found.
      partial(start_jax, 8),
      store,
      processes_of(instance, spec),
    )
    for instance in instances
  ]


def send(backend: 'RayBackend', name: str, number: signal.Signals) -> None:
  """A signal to an instance's process, whatever state that is in."""
  os.kill(backend.crew.process_ids[name], number)


class Watch:
  """Sees what a run decides and tells, and acts on it once."""

  def __init__(
    self,
    on_event: Callable[['Watch', Any], bool] = lambda watch, event: False,
  ):
    """`on_event` is called with each event until it says that it acted."""
    self.placed: dict[tuple[str, int], Placement] = {}
    self.events: list[Event] = []
    self.acted_s: float | None = None
    self._on_event = on_event

  def decided(self, decision: Decision) -> None:
    assert isinstance(decision.decision, Placement), decision
    self.placed[decision.request_id, decision.attempt] = decision.decision

  def heard(self, event: Event) -> None:
    self.events.append(event)
    if self.acted_s is None and self._on_event(self, event):
      self.acted_s = event.time_s

  def of(self, *kinds: type) -> list[Any]:
    return [e for e in self.events if isinstance(e, kinds)]


def serve_watched(requests, cluster: Cluster, watch: Watch):
  """Serves requests from now on; nothing may be left when all is over."""
  conductor, now_s = (
    make_conductor(cluster.spec, max_attempts=5),
    cluster.backend.now_s(),
  )
  for inventory in cluster.inventories():
    conductor.observe(inventory)
  records, _ = serve(
    [replace(r, arrival_s=r.arrival_s + now_s) for r in requests],
    conductor,
    cluster,
    on_event=watch.heard,
    on_decision=watch.decided,
  )
  settle(cluster)
  return records


def settle(cluster: Cluster) -> None:
  """Waits until all instances are there, idle, and hold no more than blocks."""
  backend = cluster.backend
  until_s = backend.now_s() + BACK_S
  while (left := leftovers(cluster)) or not cluster.idle:
    assert backend.now_s() < until_s, left
    cluster.step(backend.now_s() + 0.2)
  cluster.check()


def leftovers(cluster: Cluster) -> list[str]:
  """What is missing, or held for nobody."""
  known = {
    use.name: use.used_bytes
    for use in cluster.master.statistics().segments
    if medium(use.name) != 'device'
  }
  backend: Any = cluster.backend
  found, held = [*cluster.leaks()], backend.holdings()
  for name in (*cluster.prefill, *cluster.decode):
    if name not in held:
      found.append(f'{name} is not there')
      continue
    each = held[name]
    if each.num_works or each.buffer_bytes:
      found.append(f'{name}: {each}')
    for segment, num_bytes in each.segment_bytes.items():
      if num_bytes != known.get(segment, 0):
        found.append(f'{segment}: {num_bytes} of {known.get(segment, 0)} bytes')
  return found


def lost(watch: Watch) -> set[str]:
  return {e.instance for e in watch.events if isinstance(e, InstanceLost)}


def tokens_of(records) -> Tokens:
  return {r.request_id: tuple(r.output_tokens) for r in records}


@contextmanager
def one_process(spec=SMALL) -> Iterator[Callable[[list[Request]], Tokens]]:
  """What gives the tokens that requests get in one process."""
  cluster = make_device(spec)

  def tokens(requests: list[Request]) -> Tokens:
    now_s = cluster.backend.now_s()
    known = [replace(each, arrival_s=now_s) for each in requests]
    return tokens_of(serve(known, make_conductor(spec), cluster)[0])

  yield tokens
  close(cluster)

# SPDX-License-Identifier: Apache-2.0
"""Twenty minutes in which an instance's process is killed every 20 s.

Two prefill and two decode instances, each a process on a host of its own
(network namespaces, where those can be made), one of whose cables loses one
packet in a hundred. Clients go away. Every request must end once, in time, with
the tokens of one process or a reason; survivors must keep nothing.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from contextlib import ExitStack
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
import random
import secrets
from typing import TYPE_CHECKING

import jax

from mooncake_jax.blocks.segments import medium
from mooncake_jax.changes import Changes
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.token import require_token
from mooncake_jax.distributed.worker import WorkerSpec
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.model.params import init_params
from mooncake_jax.request import Request
from mooncake_jax.serve import serve
from scripts.benches.chaos_found import Found
from scripts.benches.chaos_found import rows
from scripts.benches.chaos_found import SLO_HERE
from scripts.benches.chaos_load import answers
from scripts.benches.chaos_load import asked
from scripts.benches.chaos_load import Killer
from scripts.benches.chaos_load import Plan
from scripts.benches.chaos_load import texts
from scripts.benches.namespaces import Host
from scripts.benches.namespaces import hosts
from scripts.benches.namespaces import why_not
from scripts.benches.rows import Row
from scripts.benches.soak import BLOCK_BYTES
from scripts.benches.soak import CONFIG
from scripts.benches.soak import COSTS
from scripts.device import instance_specs
from scripts.device import start_jax

if TYPE_CHECKING:
  from mooncake_jax.distributed.backend import RayBackend

SECONDS, QUICK_SECONDS = 1200.0, 70.0
KILL_EVERY_S, QUIET_S = 20.0, 10.0  # none in the first and the last seconds
PER_S, NUM_TEXTS, SEED = 6.0, 120, 0
LOSS, CANCELS = 0.01, 0.05
SETTLE_S = 60.0
SPEC = ClusterSpec(
  block_size_tokens=16,
  page_tokens=8,
  chunk_tokens=64,
  layers_per_transfer=2,
  prefill_pool_tokens=1024,
  decode_pool_tokens=2048,
  max_batch=8,
  host_bytes=96 * BLOCK_BYTES,
  transfer_timeout_s=10.0,
  request_timeout_s=30.0,
)
WHOM_LOSES = 'decode0'


def chaos(quick: bool) -> list[Row]:
  """Twenty minutes, or one."""
  return [*rows(run(QUICK_SECONDS if quick else SECONDS))]


def run(seconds: float, per_s: float = PER_S) -> Found:
  """Serves for so long on processes that are killed."""
  some = texts(NUM_TEXTS, CONFIG.vocab_size, SPEC.block_size_tokens, SEED)
  with _one_process() as alone:
    right = answers(some, _conductor(alone.spec), alone)
    some = [text for text in some if text.request_id in right]
  with _processes() as (backend, on_hosts):
    _warm(backend, some, right)
    backend.restart_clock()
    cluster, conductor = _cluster(backend)
    found = Found(right, backend.now_s, seconds, SPEC.request_timeout_s)
    found.on_hosts, killer = on_hosts, Killer(backend, SEED)
    plan = Plan(
      asked(some, seconds, per_s, SEED),
      Changes(cancel_share=CANCELS, cancel_after_s=0.5, seed=SEED),
      killer,
      _kill_times_s(seconds),
    )
    found.asked = plan.num_requests
    before = backend.holdings()
    serve(
      plan,
      conductor,
      cluster,
      on_event=found.heard,
      keeps_journal=False,
      on_record=found.ended,
    )
    found.kills = killer.kills
    found.leftovers = _settle(cluster, backend)
    found.before, found.after = before, backend.holdings()
  return found


def _kill_times_s(seconds: float) -> list[float]:
  """One in each `KILL_EVERY_S`, at random in its middle half."""
  rng, times_s = random.Random(SEED), []
  at_s = QUIET_S
  while at_s + KILL_EVERY_S <= seconds - QUIET_S:
    times_s.append(at_s + KILL_EVERY_S * rng.uniform(0.25, 0.75))
    at_s += KILL_EVERY_S
  return times_s


def _conductor(spec: ClusterSpec) -> Conductor:
  rules = ConductorSpec(admission='none', max_attempts=9)
  return Conductor(rules, spec, CONFIG, COSTS, SLO_HERE)


def _cluster(backend: 'RayBackend') -> tuple[Cluster, Conductor]:
  cluster = Cluster(SPEC, CONFIG, backend, costs=COSTS)
  return cluster, _conductor(SPEC)


@contextmanager
def _one_process() -> Iterator[Cluster]:
  spec = replace(SPEC, prefill_instances=1, decode_instances=1)
  params = init_params(CONFIG, jax.random.key(SEED))
  instances = instance_specs(spec, CONFIG)
  with DeviceBackend(CONFIG, spec.layout(CONFIG), instances, params) as backend:
    warmup(backend)
    yield Cluster(spec, CONFIG, backend, costs=COSTS)


@contextmanager
def _processes() -> Iterator[tuple['RayBackend', str]]:
  """The processes, and why they are on this host if they have none."""
  require_token()
  from mooncake_jax.distributed.backend import RayBackend  # brings Ray

  names = (*SPEC.prefill_names, *SPEC.decode_names)
  why = why_not()
  with ExitStack() as stack:
    made = stack.enter_context(
      nullcontext([None] * len(names)) if why else hosts(len(names))
    )
    places = dict(zip(names, made))
    if (place := places[WHOM_LOSES]) is not None:
      place.lose(LOSS)
    spec = RaySpec(max_restarts=1 << 20)
    backend = RayBackend(SPEC.layout(CONFIG), _workers(places), spec)
    yield stack.enter_context(backend), why


def _workers(places: dict[str, Host | None]) -> list[WorkerSpec]:
  """By TCP: UCX would find shared memory, and lose no packet."""
  secret = secrets.token_hex(32)
  params = init_params(CONFIG, jax.random.key(SEED))
  made = []
  for instance in instance_specs(SPEC, CONFIG):
    place = places[instance.name]
    wire = WireSpec('tcp', checksums=True)
    if place is not None:
      wire = replace(wire, bind=place.address)
    made.append(
      WorkerSpec(
        CONFIG,
        SPEC.layout(CONFIG),
        instance,
        tuple(name for name in places if name != instance.name),
        params,
        'float32',
        wire,
        secret,
        partial(_prepare, place),
      )
    )
  return made


def _prepare(place: Host | None) -> None:
  """In the worker: goes to its host, and starts JAX there."""
  if place is not None:
    place.enter()
  start_jax(1)
  # Whoever is started later finds all programs compiled.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


def _warm(
  backend: 'RayBackend',
  some: Sequence[Request],
  right: dict[str, tuple[int, ...]],
) -> None:
  """All processes have served, and have their threads; checks each text."""
  cluster, conductor = _cluster(backend)
  evenly = [replace(r, arrival_s=i / PER_S) for i, r in enumerate(some)]
  records, _ = serve(evenly, conductor, cluster)
  if wrong := [
    r for r in records if tuple(r.output_tokens) != right[r.request_id]
  ]:
    raise RuntimeError(f'before any kill: {wrong}')
  for segment in cluster.master.segments():
    if medium(segment) != 'device':
      cluster.lose_segment(segment)
  _settle(cluster, backend)


def _settle(cluster: Cluster, backend: 'RayBackend') -> list[str]:
  """Waits until all are there and idle; what is left of others' by then."""
  until_s = backend.now_s() + SETTLE_S
  while (left := _leftovers(cluster, backend)) and backend.now_s() < until_s:
    cluster.step(backend.now_s() + 0.5)
  return left


def _leftovers(cluster: Cluster, backend: 'RayBackend') -> list[str]:
  known = {s.name: s.used_bytes for s in cluster.master.statistics().segments}
  found = [*cluster.leaks()]
  held = backend.holdings()
  for name in (*cluster.prefill, *cluster.decode):
    if (each := held.get(name)) is None:
      found.append(f'{name} is not there')
      continue
    if each.num_works or each.buffer_bytes:
      found.append(f'{name}: {each}')
    found += [
      f'{segment}: {num_bytes} bytes of {known.get(segment, 0)}'
      for segment, num_bytes in each.segment_bytes.items()
      if num_bytes != known.get(segment, 0)
    ]
  return found

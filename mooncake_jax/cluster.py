# SPDX-License-Identifier: Apache-2.0
"""The cluster: instances and store over one backend, as one state machine.

What may be asked of a cluster, and what time alone brings; how a run moves
from one work to the next stands in `instance/flow.py`.
"""

from collections.abc import Container
from collections.abc import Iterable
from functools import partial
import heapq

from mooncake_jax.backend import Ahead
from mooncake_jax.backend import Backend
from mooncake_jax.backend import Replica
from mooncake_jax.blocks.segments import Medium
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.cluster_members import Members
from mooncake_jax.cluster_members import Role
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.costs.model import CostModel
from mooncake_jax.events import Event
from mooncake_jax.events import Inventory
from mooncake_jax.instance.chunking import chunk_plan
from mooncake_jax.instance.decode import Recheck
from mooncake_jax.instance.flow import Flow
from mooncake_jax.instance.make import make_decode
from mooncake_jax.instance.make import make_prefill
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.run import RunKey
from mooncake_jax.instance.telling import adopted
from mooncake_jax.instance.telling import copying
from mooncake_jax.instance.telling import dropped
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from mooncake_jax.store.client import StoreClient
from mooncake_jax.store.setup import lose
from mooncake_jax.store.setup import make_master
from mooncake_jax.store.setup import segments_of

REAP_EVERY_S = 1.0


class Cluster:
  """Prefill and decode instances, their store and the backend."""

  def __init__(
    self,
    spec: ClusterSpec,
    model: ModelConfig,
    backend: Backend,
    recheck: Recheck | None = None,
    costs: CostModel | None = None,
  ):
    """Makes an idle cluster with empty segments.

    Args:
      spec: sizes and counts.
      model: whose KVCache it holds.
      backend: where time passes; has the instances that `spec` names.
      recheck: see `DecodeInstance`.
      costs: what a chunk is thought to take, for `ClusterSpec.chunking`.

    Raises:
      ValueError: a spec that does not fit the model, or lacks costs.
    """
    self.spec = spec
    self.backend = backend
    self.layout = spec.layout(model)
    self.max_tokens = spec.max_request_tokens(model)
    self.master = make_master(spec, self.layout.block_bytes)
    self._client = StoreClient(self.master, self.layout)
    plan = chunk_plan(spec, spec.layers_of_stages(model), costs)
    new_prefill = partial(make_prefill, spec, self.layout, self._client, plan)
    new_decode = partial(make_decode, spec, self.layout, recheck)
    self.prefill = {name: new_prefill(name) for name in spec.prefill_names}
    self.decode = {name: new_decode(name) for name in spec.decode_names}
    self._flow = Flow(spec, self.layout, backend, self.prefill, self.decode)
    self._members = Members(
      spec,
      self.layout,
      self._client,
      self._flow,
      backend,
      new_prefill,
      new_decode,
    )
    self._deadlines: list[tuple[float, RunKey]] = []
    self._reaped_s = 0.0
    self._adopt()

  # Requests in and out.

  def refusal(self, request: Request) -> str:
    """Why this request can never be served; '' if it can."""
    total = request.num_prompt_tokens + request.max_output_tokens
    if total > self.max_tokens:
      return (
        f'num_prompt_tokens={request.num_prompt_tokens} + '
        f'max_output_tokens={request.max_output_tokens} exceeds '
        f'max_tokens={self.max_tokens}'
      )
    blocks = request.num_prompt_tokens // self.layout.block_size_tokens
    if len(request.block_keys) != blocks:
      return (
        f'{len(request.block_keys)} block_keys for {blocks} complete '
        f'blocks of {self.layout.block_size_tokens} tokens'
      )
    return ''

  def submit(self, request: Request, placement: Placement) -> None:
    """Accepts a placed request; its events come from `step`."""
    run = Run(request, placement)
    assert not self.refusal(request), self.refusal(request)
    heapq.heappush(
      self._deadlines,
      (request.arrival_s + self.spec.request_timeout_s, run.key),
    )
    if blame := self._members.refusal(placement):
      self._flow.refuse(run, f'{blame} takes no requests', blame)
    else:
      self._flow.begin(run)

  def cancel(self, request_id: str) -> None:
    """Ends the request's try; its pages go as soon as works allow."""
    run = self._flow.last_try(request_id)
    if run is None or run.ended:
      return
    if isinstance(self.backend, Ahead):
      for completion in self.backend.progress():
        self._flow.complete(completion)
    self._flow.cancel(run)

  # Instances and blocks; see `Members`.

  def lose(self, instance: str) -> None:
    """An instance is gone with all it had; runs that need it fail."""
    self._members.lose(instance)

  def drain(self, instance: str) -> None:
    """No new run goes there; when those there have ended, it is gone."""
    self._members.drain(instance)

  def join(self, instance: str) -> None:
    """An instance that is gone is back, with empty memory."""
    self._members.join(instance)

  def set_role(self, instance: str, role: Role) -> None:
    """Drains an instance and makes it one of the other role."""
    self._members.set_role(instance, role)

  def role_refusal(self, instance: str, role: Role) -> str:
    """Why `set_role` would fail now; '' if it would not."""
    return self._members.role_refusal(instance, role)

  def replicate(self, keys: Iterable[BlockKey], src: str, dst: str) -> None:
    """Copies an instance's blocks to a segment, as far as there is room."""
    self._members.replicate(keys, src, dst)

  def drop(self, keys: Iterable[BlockKey], segment: str) -> None:
    """Takes blocks out of a segment, each as soon as nobody reads it there."""
    self._members.drop(keys, segment)

  def adopt(self, segment: str, keys: Iterable[BlockKey]) -> list[Replica]:
    """Publishes blocks whose bytes the caller brings before the next step.

    The last counts as the last used; what finds no room is left out.
    """
    num_bytes, master = self.layout.block_bytes, self.master
    found = [master.adopt(key, num_bytes, segment) for key in keys]
    replicas = [replica for replica in found if replica is not None]
    told = master.events.stored(replicas, self.backend.now_s())
    self._flow.apply([*told])
    return replicas

  def inventory(self, segment: str) -> tuple[BlockKey, ...]:
    """Keys that the segment can serve."""
    return self.master.inventory(segment)

  def inventories(
    self, of: Container[tuple[str, str]] | None = None
  ) -> list[Inventory]:
    """All that the segments can serve now, as events.

    A Conductor that hears them knows what one knows that heard all events.

    Args:
      of: only of segments of these instances and media.
    """
    now_s, master = self.backend.now_s(), self.master
    return [
      master.events.inventory(segment, master.inventory(segment), now_s)
      for segment in master.segments()
      if of is None or (owner(segment), medium(segment)) in of
    ]

  def held_blocks(self) -> dict[tuple[str, Medium], int]:
    """Blocks that are readable, by instance and medium."""
    return {
      (owner(segment), medium(segment)): self.master.num_published(segment)
      for segment in self.master.segments()
    }

  def leaks(self) -> list[str]:
    """What an idle cluster holds for nobody; empty unless there is an error."""
    found: list[str] = []
    for instance in (*self.prefill.values(), *self.decode.values()):
      if not instance.is_free:
        found.append(f'pages: {instance.name} holds some for no request')
    for use in self.master.statistics().segments:
      num_bytes = use.num_copies * self.layout.block_bytes
      if use.used_bytes != num_bytes:
        found.append(
          f'bytes of {use.name}: {use.used_bytes} are taken, '
          f'{use.num_copies} blocks have {num_bytes}'
        )
    return found

  def lose_segment(self, segment: str) -> None:
    """All bytes of a segment are lost; it goes on empty. Reads of them fail."""
    self._flow.apply(
      dropped(
        self.master,
        lose(self.master, self.spec, segment, self.layout.block_bytes),
        self.backend.now_s(),
      )
    )

  @property
  def tells_works(self) -> bool:
    """Whether `step` tells of each work's end: for timelines only."""
    return self._flow.tells_works

  @tells_works.setter
  def tells_works(self, value: bool) -> None:
    self._flow.tells_works = value

  @property
  def idle(self) -> bool:
    """Whether nothing is under way and all events were told."""
    return self._flow.idle and not self.has_news

  @property
  def has_news(self) -> bool:
    """Whether `step` has events to tell at once."""
    return self._flow.has_events

  def step(self, until_s: float | None) -> list[Event]:
    """Waits for something to happen, at most to `until_s`; returns events.

    Where a submit or cancel has caused events already, it does not wait.
    """
    backend, deadline_s = self.backend, self._next_deadline()
    if self._flow.has_events:
      until_s = backend.now_s()
    elif deadline_s is not None and (until_s is None or deadline_s < until_s):
      until_s = deadline_s
    completions = backend.wait(until_s)
    self._members.follow()
    for completion in completions:
      self._flow.complete(completion)
    self._members.advance()
    now_s = backend.now_s()
    if deadline_s is not None and deadline_s <= now_s:
      self._expire(now_s)
    if now_s - self._reaped_s >= REAP_EVERY_S:
      self._reap(now_s)
    return self._flow.take_events()

  def check(self) -> None:
    """Raises AssertionError if pools, store or works disagree."""
    self.master.check()
    for instance in (*self.prefill.values(), *self.decode.values()):
      instance.check()
    if self._flow.idle:
      for instance in (*self.prefill.values(), *self.decode.values()):
        assert instance.is_free, instance.name

  def _next_deadline(self) -> float | None:
    while self._deadlines and self._deadlines[0][1] not in self._flow.runs:
      heapq.heappop(self._deadlines)
    return self._deadlines[0][0] if self._deadlines else None

  def _expire(self, now_s: float) -> None:
    while (deadline_s := self._next_deadline()) is not None:
      if deadline_s > now_s:
        return
      run = self._flow.runs[heapq.heappop(self._deadlines)[1]]
      if not run.ended:
        self._flow.fail(
          run,
          now_s,
          f'deadline while {run.state}: '
          f'request_timeout_s={self.spec.request_timeout_s}',
        )

  def _adopt(self) -> None:
    """Takes over what earlier processes left, in memory and on SSDs."""
    if not self.spec.reuse:
      return
    block_bytes, now_s = self.layout.block_bytes, self.backend.now_s()
    for name in self.spec.prefill_names:
      for segment in segments_of(self.spec, name):
        if medium(segment) != 'device':
          self._flow.apply(
            adopted(self.master, self.backend, segment, block_bytes, now_s)
          )

  def _reap(self, now_s: float) -> None:
    """What time alone brings in the store, about once a second: dead puts
    end, hot blocks that lost a replica get one again."""
    self._reaped_s = now_s
    self._flow.apply(dropped(self.master, self.master.reap(now_s), now_s))
    copies = self._client.repair(now_s)
    self._flow.apply(copying(self.master, copies, now_s))

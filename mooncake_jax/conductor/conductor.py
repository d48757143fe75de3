# SPDX-License-Identifier: Apache-2.0
"""The Conductor: one request in, a Placement or a Rejection out.

`place` decides on its view (prefix index, loads, cost models) and reserves in
it; `observe` keeps it true. It returns values and never calls an instance, so
the same object drives devices and a simulation, and a run's recorded calls
replay to the same placements.

As in FAST'25 section 4.1, Algorithm 1. Differs: see `policies.paper`.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
import copy

from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.conductor.advice import Advice
from mooncake_jax.conductor.adviser import Adviser
from mooncake_jax.conductor.decide import decide
from mooncake_jax.conductor.decide import Try
from mooncake_jax.conductor.explain import explain
from mooncake_jax.conductor.explain import Explanation
from mooncake_jax.conductor.joining import may_join
from mooncake_jax.conductor.observing import observe
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.telemetry import EventLine
from mooncake_jax.conductor.view import View
from mooncake_jax.conductor.work_costs import InstanceBelief
from mooncake_jax.costs.model import CostModel
from mooncake_jax.events import Event
from mooncake_jax.events import Inventory
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.request import Request
from mooncake_jax.slo import SLO

ASK_EVERY_S = 5.0


class Conductor:
  """A view of one cluster, and decisions on it."""

  def __init__(
    self,
    spec: ConductorSpec,
    cluster: ClusterSpec,
    model: ModelConfig,
    costs: CostModel,
    slo: SLO,
    instances: Mapping[str, InstanceBelief] | None = None,
  ):
    """Makes a Conductor of an idle cluster with empty segments.

    Args:
      spec: policy and admission.
      cluster, model: what it schedules; it never sees the cluster itself.
      costs: its belief about seconds.
      slo: the limits it admits by.
      instances: those that differ from what `cluster` and `costs` say, sizes
        included (see `belief_of`).

    Raises:
      ValueError: roles are to change that can't.
    """
    if spec.roles is not None and cluster.colocated:
      raise ValueError(
        f'ConductorSpec.roles={spec.roles} needs ClusterSpec.colocated=False'
      )
    self.spec = spec
    self.slo = slo
    self.costs = costs
    self.view = View(spec, cluster, model, costs, instances or {})
    self._line = EventLine(spec.telemetry)
    self._adviser = Adviser(spec, self.view)
    self._asked_s = 0.0

  def place(
    self,
    request: Request,
    now_s: float,
    attempt: int = 0,
    avoid: frozenset[str] = frozenset(),
  ) -> Placement | Rejection:
    """Decides where a request goes, and counts it there from now on."""
    self._catch_up(request, now_s)
    asked = Try(request, attempt, avoid)
    decided = decide(self.view, self.spec, self.slo, asked, now_s)
    if isinstance(decided, Placement):
      self.view.reserve(request, decided, now_s)
      self._adviser.placed(request, decided, now_s)
    return decided

  def observe(self, event: Event) -> None:
    """Updates the beliefs, as soon as `spec.telemetry` brings the event."""
    self._line.send(event)
    self._hear(event.time_s)

  def explain(
    self,
    request: Request,
    now_s: float,
    attempt: int = 0,
    avoid: frozenset[str] = frozenset(),
  ) -> Explanation:
    """The table that `place` would decide from now; changes nothing.

    Where the view is behind `now_s` a copy is brought to it: a journal has no
    explanations in it, so that asking for some must not change what follows.
    """
    seen = self
    if self._behind(request, now_s):
      seen = copy.deepcopy(self)
      seen._catch_up(request, now_s)
    asked = Try(request, attempt, avoid)
    return explain(seen.view, self.spec, self.slo, asked, now_s)

  def advise(self, now_s: float) -> list[Advice]:
    """Copies and roles to change, as `spec` wants; taken to be carried out.

    From the view as it stands: a journal has no advice in it, so that asking
    for some must not change what is placed after.
    """
    return self._adviser.advise(now_s)

  def drain(self, instance: str) -> None:
    """Places nothing there any more, until it joins again."""
    self.view.close(instance)

  def rebuild(self, inventories: Iterable[Inventory]) -> None:
    """After a restart: believes in what the instances say they hold."""
    for inventory in inventories:
      self.view.index.observe(inventory)

  def doubtful(self, now_s: float) -> Collection[tuple[str, str]]:
    """Segments (instance, tier) whose inventory it asks for: events were lost.

    None again for `ASK_EVERY_S`: an answer takes time in what a segment holds,
    and may be late or lost itself.
    """
    if now_s < self._asked_s + ASK_EVERY_S:
      return ()
    self._asked_s = now_s
    return self.view.index.doubtful()

  def keeps_tbt(
    self, request: Request, instance: str, num_rows: int, context_tokens: int
  ) -> bool:
    """The decode instance's double check: would it keep the SLO in there?"""
    beliefs = self.view, self.spec, self.slo
    return may_join(*beliefs, request, instance, num_rows, context_tokens)

  def _catch_up(self, request: Request, now_s: float) -> None:
    """Brings the view to `now_s`, for a new try of `request`."""
    self._hear(now_s)
    # Its last try has ended, though nobody may have said so yet.
    self.view.end_try(request.request_id, now_s)

  def _behind(self, request: Request, now_s: float) -> bool:
    """Whether `_catch_up` would change anything."""
    return (
      request.request_id in self.view.placed
      or self._line.has_arrived(now_s)
      or self.view.is_due(now_s)
    )

  def _hear(self, now_s: float) -> None:
    """Brings the view to `now_s`, as far as telemetry has come."""
    view, line = self.view, self._line
    while line.has_arrived(now_s):
      observe(view, line.take())
    if view.is_due(now_s):
      view.pass_time(now_s)

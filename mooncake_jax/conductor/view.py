# SPDX-License-Identifier: Apache-2.0
"""The Conductor's view of the cluster: every belief, kept true by events.

A decision is a pure function of a view and a request. Whatever is reserved
for a request is given back when it ends, and when its reservation expires: a
cluster fails every request at its deadline, so past that nothing is held even
if nobody said so.
"""

from collections.abc import Iterator
from collections.abc import Mapping

import numpy as np

from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.conductor.corrections import Correction
from mooncake_jax.conductor.corrections import Lateness
from mooncake_jax.conductor.corrections import Odds
from mooncake_jax.conductor.corrections import Settling
from mooncake_jax.conductor.corrections import WorkCorrection
from mooncake_jax.conductor.decode_choice import tail
from mooncake_jax.conductor.decode_horizon import DecodeHorizon
from mooncake_jax.conductor.decode_load import DecodeLoads
from mooncake_jax.conductor.fleet import Fleet
from mooncake_jax.conductor.matches import positions
from mooncake_jax.conductor.output_lengths import OutputLengths
from mooncake_jax.conductor.placed import Placed
from mooncake_jax.conductor.placed import Reservations
from mooncake_jax.conductor.prefill_load import Planned
from mooncake_jax.conductor.prefill_load import PrefillLoads
from mooncake_jax.conductor.prefix_index import PrefixIndex
from mooncake_jax.conductor.running_mean import RunningMean
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.work_costs import belief_of
from mooncake_jax.conductor.work_costs import InstanceBelief
from mooncake_jax.conductor.work_costs import WorkCosts
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import Link
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Placement
from mooncake_jax.request import Request

# Masks whose rows are remembered: few sets of instances share prefixes.
MAX_MASKS = 1 << 12


class View:
  """What is believed of all instances and requests.

  Attributes:
    index: who holds which block.
    prefill, decode: queues, batches and room.
    fleet: costs of the prefill instances, in the order of `prefill.names`.
    partners: see `ClusterSpec`.
    placed: requests under way.
    horizon: when each of them decodes.
    lengths, durations: tokens of an output, seconds that it decodes.
    prefill_error, transfer_error, step_error: online corrections of what a
      request takes.
    pace_error, queue_error: of queues, by instance, and of all at once.
    tbt_odds, join_odds: how far a predicted TBT is off, when a request comes
      and when it joins its batch.
    lateness: how far a predicted TTFT is exceeded.
  """

  def __init__(
    self,
    spec: ConductorSpec,
    cluster: ClusterSpec,
    model: ModelConfig,
    costs: CostModel,
    instances: Mapping[str, InstanceBelief],
  ):
    """An idle cluster with empty segments; see `Conductor`."""
    self.layout = cluster.layout(model)
    self.reuse = cluster.reuse
    self.partners = cluster.partners
    first = self.layout.layer_ranges[0][1] / self.layout.num_layers
    self.overlap = 1 - first if cluster.streaming == 'layers' else 0.0
    self._streaming = cluster.streaming
    self._timeout_s = cluster.request_timeout_s
    self._default = belief_of(cluster, model, costs)
    sizes = {
      n: belief_of(cluster.of(n), model, costs) for n in cluster.instances
    }
    self._instances = {**sizes, **instances}
    self._kinds: dict[InstanceBelief, WorkCosts] = {}
    self.index = PrefixIndex(cluster.prefill_names)
    self.pace_error = Settling(spec.correct)
    self.prefill = PrefillLoads(self.pace_error)
    self._rows: dict[int, np.ndarray] = {}
    self.decode = DecodeLoads(
      cluster.page_tokens,
      cluster.max_decode_steps if cluster.decode_reserve == 'prompt' else None,
    )
    self.prefill_error = Correction(spec.correct, up=0.1, down=0.1)
    self.transfer_error = Correction(spec.correct, up=0.02, down=0.1)
    self.step_error = Correction(spec.correct, up=0.02, down=0.02)
    self.queue_error = WorkCorrection(spec.correct)
    self.tbt_odds = Odds(spec.correct)
    self.join_odds = Odds(spec.correct)
    self.lateness = Lateness(spec.correct)
    self.placed = Reservations()
    self.horizon = DecodeHorizon()
    self.lengths = OutputLengths(spec.prior_output_tokens)
    step_s = costs.decode_step_s(1, 1)
    self.durations = RunningMean(spec.prior_output_tokens * step_s)
    for name in cluster.prefill_names:
      self.join(name, 'prefill')
    for name in cluster.decode_names:
      self.join(name, 'decode')
    for name in cluster.absent:
      self.close(name)

  def join(self, name: str, role: str) -> None:
    """An instance takes requests in this role from now on, in no other."""
    belief = self._belief(name)
    if belief not in self._kinds:
      self._kinds[belief] = WorkCosts(
        belief, self.layout.block_bytes, self.layout.block_size_tokens
      )
    work = self._kinds[belief]
    self.close(name)
    if role == 'prefill':
      self.prefill.join(name, work)
      self.prefill_error.join(self.prefill.row[name])
      self.transfer_error.join(self.prefill.row[name])
      self.index.position(name)
      self._rows.clear()
      self.fleet = Fleet(self.prefill.names, self.prefill.work)
    elif role == 'decode':
      self.decode.join(name, belief, work.step)
      self.step_error.join(self.decode.row[name])
    else:
      raise ValueError(f"{role=} must be 'prefill' or 'decode'")

  def rows(self, mask: int) -> np.ndarray:
    """Prefill rows of a mask of index positions; others have none."""
    rows = self._rows.get(mask)
    if rows is None:
      if len(self._rows) >= MAX_MASKS:
        self._rows.clear()
      names, row = self.index.names, self.prefill.row
      some = [row[names[p]] for p in positions(mask) if names[p] in row]
      rows = self._rows[mask] = np.array(some, np.int64)
    return rows

  def close(self, name: str) -> None:
    """An instance takes no more requests, in whatever role."""
    self.prefill.close(name)
    self.decode.close(name)

  def with_partner(
    self, prefills_I: np.ndarray, decodes_I: np.ndarray
  ) -> np.ndarray:
    """Of able prefill instances those whose partner can decode."""
    if not self.partners:
      return prefills_I
    row = self.decode.row
    partners = [row[self.partners[name]] for name in self.prefill.names]
    return prefills_I & decodes_I[partners]

  def only_partner(self, prefill: str, decodes_I: np.ndarray) -> np.ndarray:
    """Where a request prefilled there may decode."""
    if not self.partners:
      return decodes_I
    only_I = np.zeros_like(decodes_I)
    only_I[self.decode.row[self.partners[prefill]]] = True
    return only_I & decodes_I

  def reserve(
    self, request: Request, placement: Placement, now_s: float
  ) -> None:
    """Counts a request where it was placed."""
    name, at = request.request_id, placement
    i = self.prefill.row[at.prefill]
    factor = self.prefill_error.factor_I.item(i)
    busy_s = self.fleet.work_I[i].busy_s(
      request.num_prompt_tokens,
      at.reused_blocks * self.layout.block_size_tokens,
      at.prefill_s / factor,
    )
    transfers = [
      Planned(o, link, s, self.prefill.occupy(o, link, s, now_s))
      for link, o, s in self._ways(i, at)
    ]
    placed = Placed(
      request,
      placement,
      now_s,
      factor,
      self.tbt_odds.factor,
      transfers=transfers,
    )
    expires_s = request.arrival_s + self._timeout_s
    self.placed.add(placed, max(expires_s, now_s))
    self.prefill.add(at.prefill, name, busy_s, now_s, now_s + at.fetch_s)
    self.decode.add(
      at.decode,
      name,
      request.num_prompt_tokens,
      request.max_output_tokens,
      now_s + at.ttft_s,
      self._tail(request, at),
    )
    self.horizon.expect(name, now_s + at.ttft_s)
    if self.reuse:
      self.index.expect(at.prefill, request.block_keys)

  def late_kv_s(self, request: Request, at: Placement) -> float:
    """How long KVCache still is on its way to decode when prefill ends.

    What the last chunk computed, as far as it does not leave layer by layer.
    """
    if self.partners:
      return 0.0
    size, belief = self.layout.block_size_tokens, self._belief(at.prefill)
    tokens = request.num_prompt_tokens
    if self._streaming != 'prompt':
      computed = max(tokens - at.reused_blocks * size, 1)
      tokens = 1 + (computed - 1) % belief.chunk_tokens
    num_bytes = tokens * self.layout.block_bytes / size
    if self._streaming == 'layers':
      start, stop = self.layout.layer_ranges[-1]
      num_bytes *= (stop - start) / self.layout.num_layers
    return belief.costs.transfer_s(int(num_bytes), 'handoff')

  def _belief(self, name: str) -> InstanceBelief:
    return self._instances.get(name, self._default)

  def _tail(self, request: Request, at: Placement) -> float:
    """The request's TBT in steps of its decode instance."""
    step_s = self.decode.step_s_I.item(self.decode.row[at.decode])
    late = self.late_kv_s(request, at) / step_s
    return tail(self.lengths.expected(request.max_output_tokens), late=late)

  def fetch_alone_s(self, at: Placement) -> float:
    """What the cost model says of a prefix's way on links that are idle."""
    i = self.prefill.row[at.prefill]
    factor = float(self.transfer_error.factor_I[i])
    return max((s for _, _, s in self._ways(i, at)), default=0.0) / factor

  def _ways(self, i: int, at: Placement) -> Iterator[tuple[Link, int, float]]:
    """Links that a prefix crosses to row i, whose they are, for how long."""
    factor = float(self.transfer_error.factor_I[i])
    source = i if at.fetch_from is None else self.prefill.row[at.fetch_from]
    ways: tuple[tuple[Link, int, int], ...] = (
      ('onload', i, at.host_blocks),
      ('ssd_read', i, at.ssd_blocks),
      ('copy', source, at.fetch_blocks),
      ('remote_read', i, at.store_blocks),
    )
    for link, owner, num_blocks in ways:
      if num_blocks:
        line = self.fleet.work_I[owner].links[link]
        seconds = line.latency_s + line.block_s * num_blocks
        yield link, owner, factor * seconds

  def release(self, placed: Placed, now_s: float) -> None:
    """Gives back whatever a request still holds."""
    name, at = placed.request.request_id, placed.placement
    self.placed.pop(placed)
    self.prefill.remove(at.prefill, name, now_s)
    self.decode.remove(name)
    self.horizon.remove(name)
    if not placed.prefilled:
      self.unexpect(placed)
      for planned in placed.transfers:
        self.prefill.vacate(planned, now_s)

  def unexpect(self, placed: Placed) -> None:
    """Its blocks are stored by now, or never will be."""
    if self.reuse:
      self.index.unexpect(placed.placement.prefill, placed.request.block_keys)

  def end_try(self, request_id: str, now_s: float) -> None:
    """Nothing is held for the request any more; ignores one not placed."""
    placed = self.placed.of(request_id)
    if placed is not None:
      self.release(placed, now_s)

  def pass_time(self, now_s: float) -> None:
    """What time alone changes: reservations expire, lost ends are assumed."""
    for placed in self.placed.expired(now_s):
      self.release(placed, now_s)
    self.prefill.skip_overdue(now_s)

  def is_due(self, now_s: float) -> bool:
    """Whether `pass_time` would change anything."""
    return self.placed.is_due(now_s) or self.prefill.is_due(now_s)

  def check(self) -> None:
    """Raises AssertionError if what is reserved is not what is placed."""
    self.decode.check()
    assert len(self.decode) == len(self.placed) == len(self.horizon)
    queued = sum(not placed.prefilled for placed in self.placed)
    assert len(self.prefill) <= queued
    if not len(self.placed):
      assert not self.prefill.queue_s_I(0.0).any()

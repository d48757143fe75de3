# SPDX-License-Identifier: Apache-2.0
"""The Conductor: one request in, a Placement or a Rejection out.

`place` decides on beliefs (prefix index, loads, cost model) and reserves in
them; `observe` keeps them true. It returns values and never calls an
instance, so the same object drives devices and a simulation, and a run's
recorded calls replay to the same placements.

As in FAST'25 section 4.1, Algorithm 1. Differs: see `select_prefill`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
import random

from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.conductor.load import DecodeLoad
from mooncake_jax.conductor.load import PrefillLoad
from mooncake_jax.conductor.prefix_index import Match
from mooncake_jax.conductor.prefix_index import PrefixIndex
from mooncake_jax.conductor.select_prefill import Candidate
from mooncake_jax.conductor.select_prefill import Choice
from mooncake_jax.conductor.select_prefill import POLICIES
from mooncake_jax.conductor.select_prefill import Question
from mooncake_jax.costs.model import CostModel
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Cancelled
from mooncake_jax.events import Event
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import InstanceLost
from mooncake_jax.events import Inventory
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import RejectedLate
from mooncake_jax.events import RequestEvent
from mooncake_jax.events import TokensEmitted
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.request import Request
from mooncake_jax.slo import SLO

ADMISSIONS = ('none', 'early_rejection')


@dataclass(frozen=True)
class ConductorSpec:
  """How the Conductor decides.

  Attributes:
    policy: where to prefill: one of `select_prefill.POLICIES`.
    admission: 'none' admits all; 'early_rejection' refuses a request whose
      predicted TTFT or TBT misses the SLO (Algorithm 1, line 22).
    balancing_threshold: see `select_prefill.Question`; the paper gives no
      value ("adjusted manually").
    late_check: whether the decode instance checks TBT again after prefill.
    seed: of the draws among equals.
  """

  policy: str = 'kvcache_centric'
  admission: str = 'early_rejection'
  balancing_threshold: float = 2.0
  late_check: bool = False
  seed: int = 0

  def __post_init__(self):
    for name, valid in (('policy', tuple(POLICIES)), ('admission', ADMISSIONS)):
      if getattr(self, name) not in valid:
        raise ValueError(
          f'ConductorSpec.{name}={getattr(self, name)!r} is '
          f'not one of {", ".join(valid)}'
        )
    if self.balancing_threshold < 1:
      raise ValueError(
        'ConductorSpec.balancing_threshold='
        f'{self.balancing_threshold} must be >= 1'
      )


class Conductor:
  """Beliefs about one cluster, and decisions on them."""

  def __init__(
    self,
    spec: ConductorSpec,
    cluster: ClusterSpec,
    model: ModelConfig,
    costs: CostModel,
    slo: SLO,
  ):
    """Makes a Conductor of an idle cluster with empty segments.

    Args:
      spec: policy and admission.
      cluster, model: what it schedules; it never sees the cluster itself.
      costs: its belief about seconds.
      slo: the limits it admits by.
    """
    self.spec = spec
    self.slo = slo
    self.costs = costs
    self.index = PrefixIndex(cluster.prefill_names)
    self._reuse = cluster.reuse
    self._layout = cluster.layout(model)
    self._chunk_tokens = cluster.chunk_tokens
    self._max_batch = cluster.max_batch
    self._policy = POLICIES[spec.policy]
    self._rng = random.Random(spec.seed)
    self._prefill = {name: PrefillLoad() for name in cluster.prefill_names}
    room = (cluster.decode_pages - 1) * cluster.page_tokens
    self._decode = {name: DecodeLoad(room) for name in cluster.decode_names}
    self._placed: dict[str, tuple[Request, Placement]] = {}

  def place(self, request: Request, now_s: float) -> Placement | Rejection:
    """Decides where a request goes, and counts it there from now on."""
    choice = self._policy(self._question(request, now_s))
    decode, tbt_s = self._select_decode(request)
    reason = self._refuse(choice, tbt_s)
    if reason:
      return Rejection(request.request_id, reason, choice.ttft_s, tbt_s)
    placement = Placement(
      request.request_id,
      0,
      choice.instance,
      decode,
      choice.local_blocks,
      choice.fetch_blocks,
      choice.fetch_from,
      choice.queue_s,
      choice.transfer_s,
      choice.prefill_s,
      tbt_s,
    )
    self._reserve(request, placement, now_s)
    return placement

  def observe(self, event: Event) -> None:
    """Updates the beliefs; an event of an unknown request is ignored."""
    match event:
      case BlocksStored() | BlocksEvicted() | Inventory() | InstanceLost():
        self.index.observe(event)
      case RequestEvent():
        self._observe_request(event)

  def keeps_tbt(self, num_rows: int, context_tokens: int) -> bool:
    """The decode instance's double check: would this batch keep the SLO?"""
    rows = min(num_rows, self._max_batch)
    context = context_tokens * rows // num_rows
    return self.costs.decode_step_s(rows, context) <= self.slo.tbt_s

  def _observe_request(self, event: RequestEvent) -> None:
    placed = self._placed.get(event.request_id)
    if placed is None or placed[1].attempt != event.attempt:
      return
    request, placement = placed
    match event:
      case TokensEmitted():
        self._decode[placement.decode].grow(
          request.request_id, event.segment.count
        )
      case PrefillDone():
        self._prefill[placement.prefill].remove(
          request.request_id, event.time_s
        )
      case Finished() | Failed() | Cancelled() | RejectedLate():
        self._forget(request, placement, event.time_s)

  def _question(self, request: Request, now_s: float) -> Question:
    matches: Mapping[str, Match] = {}
    if self._reuse:
      reusable = self._layout.reusable_blocks(request.num_prompt_tokens)
      matches = self.index.match(request.block_keys[:reusable])
    candidates = tuple(
      Candidate(
        name,
        match.usable,
        match.stored,
        load.queue_s(now_s),
        match.slow,
        match.fast,
      )
      for name, load in self._prefill.items()
      for match in (matches.get(name, Match()),)
    )
    return Question(
      request.num_prompt_tokens,
      candidates,
      self.costs,
      self._layout.block_size_tokens,
      self._layout.block_bytes,
      self._chunk_tokens,
      self.spec.balancing_threshold,
      self._rng,
      matches.get(REMOTE, Match()).stored,
    )

  def _select_decode(self, request: Request) -> tuple[str, float]:
    """SelectDecodingInstance: least predicted TBT, among those with room."""
    need = request.num_prompt_tokens + request.max_output_tokens

    def cost(name: str) -> tuple[bool, float, int]:
      load = self._decode[name]
      return (load.free_tokens < need, self._tbt_s(load, request), len(load))

    costs = {name: cost(name) for name in self._decode}
    least = min(costs.values())
    name = self._rng.choice([n for n, c in costs.items() if c == least])
    return name, least[1]

  def _tbt_s(self, load: DecodeLoad, request: Request) -> float:
    rows = min(len(load) + 1, self._max_batch)
    context = load.context_tokens + request.num_prompt_tokens
    return self.costs.decode_step_s(rows, context * rows // (len(load) + 1))

  def _refuse(self, choice: Choice, tbt_s: float) -> str:
    if self.spec.admission == 'none':
      return ''
    if choice.ttft_s > self.slo.ttft_s:
      return 'ttft'
    return 'tbt' if tbt_s > self.slo.tbt_s else ''

  def _reserve(
    self, request: Request, placement: Placement, now_s: float
  ) -> None:
    name = request.request_id
    assert name not in self._placed, f'request {name!r} is placed already'
    self._placed[name] = request, placement
    self._prefill[placement.prefill].add(
      name, placement.transfer_s + placement.prefill_s, now_s
    )
    self._decode[placement.decode].add(request)
    if self._reuse:
      self.index.expect(placement.prefill, request.block_keys)

  def _forget(
    self, request: Request, placement: Placement, now_s: float
  ) -> None:
    name = request.request_id
    del self._placed[name]
    self._prefill[placement.prefill].remove(name, now_s)
    self._decode[placement.decode].remove(name)
    if self._reuse:
      self.index.unexpect(placement.prefill, request.block_keys)

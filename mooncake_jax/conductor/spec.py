# SPDX-License-Identifier: Apache-2.0
"""How the Conductor decides, as a value that configs bind."""

from dataclasses import dataclass

from mooncake_jax.conductor.admission import Admission
from mooncake_jax.conductor.admission import ADMISSIONS
from mooncake_jax.conductor.heat import Replication
from mooncake_jax.conductor.policies import POLICIES
from mooncake_jax.conductor.question import Policy
from mooncake_jax.conductor.roles import RoleRules
from mooncake_jax.conductor.telemetry import Telemetry
from mooncake_jax.request import Request


@dataclass(frozen=True)
class ConductorSpec:
  """Policy, admission and what they go by.

  Attributes:
    policy: where to prefill: one of `policies.POLICIES`, or a function like
      them.
    admission: whom to take: one of `admission.ADMISSIONS`, or a function like
      them.
    balancing_threshold: see `question.Question`; the paper gives no value
      ("adjusted manually").
    work_weight: price of a second of prefill in 'cost_based' where all are
      busy, in seconds of TTFT; see there.
    late_check: whether the decode instance checks TBT again after prefill;
      it always does with 'load' and 'slo_predictive'.
    prior_output_tokens: guess of an output's length before any has ended.
    decode_duration_s: t_d of 'early_rejection_predicted'; None is learnt.
    priority_headroom: share of the limits that one priority below 0 may use
      with 'slo_predictive'; the next one that share of it again.
    correct: whether predictions are corrected by what is observed.
    max_attempts: tries of one request, where an instance fails it.
    replication: copies of hot prefixes made ahead; None: none.
    roles: changes of instances' roles; None: none.
    keep_explanations: whether the journal has beside each decision the tables
      that it was taken from (`explain.py`); takes a few times as long.
    telemetry: what lies between events and beliefs.
    seed: of the draws among equals.
  """

  policy: str | Policy = 'kvcache_centric'
  admission: str | Admission = 'early_rejection'
  balancing_threshold: float = 2.0
  work_weight: float = 1.0
  late_check: bool = False
  prior_output_tokens: float = 256.0
  decode_duration_s: float | None = None
  priority_headroom: float = 0.5
  correct: bool = True
  max_attempts: int = 3
  replication: Replication | None = None
  roles: RoleRules | None = None
  keep_explanations: bool = False
  telemetry: Telemetry = Telemetry()
  seed: int = 0

  def __post_init__(self):
    for name, valid in (('policy', POLICIES), ('admission', ADMISSIONS)):
      chosen = getattr(self, name)
      if not callable(chosen) and chosen not in valid:
        raise ValueError(
          f'ConductorSpec.{name}={chosen!r} is not one of {", ".join(valid)}'
        )
    for name, least in (
      ('balancing_threshold', 1),
      ('work_weight', 0),
      ('prior_output_tokens', 1),
      ('max_attempts', 1),
    ):
      if not getattr(self, name) >= least:
        raise ValueError(
          f'ConductorSpec.{name}={getattr(self, name)} must be >= {least}'
        )
    if self.decode_duration_s is not None and not self.decode_duration_s > 0:
      raise ValueError(
        f'ConductorSpec.decode_duration_s={self.decode_duration_s} must be > 0'
      )
    if not 0 < self.priority_headroom <= 1:
      raise ValueError(
        f'ConductorSpec.priority_headroom={self.priority_headroom} must be in '
        '(0, 1]'
      )

  @property
  def plans(self) -> Policy:
    """The policy as a function."""
    return self.policy if callable(self.policy) else POLICIES[self.policy]

  @property
  def admits(self) -> Admission:
    """The admission as a function."""
    if callable(self.admission):
      return self.admission
    return ADMISSIONS[self.admission]

  @property
  def checks_late(self) -> bool:
    """Whether decode instances check TBT after prefill."""
    return self.late_check or self.admission in ('load', 'slo_predictive')

  def share_of(self, request: Request) -> float:
    """Of the SLO's limits, what a request of its priority may use up."""
    return self.priority_headroom ** max(-request.priority, 0)

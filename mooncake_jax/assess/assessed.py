# SPDX-License-Identifier: Apache-2.0
"""All that an assessment found, as one value: its page and its JSON."""

from dataclasses import dataclass

from mooncake_jax.assess.break_even import BreakEven
from mooncake_jax.assess.measured import Measured
from mooncake_jax.assess.reuse import Reuse
from mooncake_jax.assess.supposed import Supposed
from mooncake_jax.assess.verdict import System
from mooncake_jax.assess.verdict import Verdict
from mooncake_jax.workload.statistics import TraceStatistics


@dataclass(frozen=True)
class Simulated:
  """What part of the trace was simulated, on what.

  Attributes:
    num_requests, first, duration_s: the part, by the index of its first row.
    requests_per_s: its own rate.
    hit_rate: what a store that is empty at its begin could reuse of it.
    nodes: of each system.
    slo_ttft_s, slo_tbt_s, target: the limits, and who must keep them.
  """

  num_requests: int
  first: int
  duration_s: float
  requests_per_s: float
  hit_rate: float | None
  nodes: int
  slo_ttft_s: float
  slo_tbt_s: float
  target: float


@dataclass(frozen=True)
class Tried:
  """One value of a sweep: full Mooncake, or another family.

  Attributes:
    value: '3 prefill + 5 decode', '500 GB a node'.
    requests_per_s: the goodput, or the rate at which it was run.
    share: of requests within both limits at that rate.
  """

  system: str
  value: str
  requests_per_s: float
  share: float
  hit_rate: float | None
  ttft_p90_s: float | None


@dataclass(frozen=True)
class Assessed:
  """The whole.

  Attributes:
    errors: lines of the trace that could not be read, and the like.
    sweeps: by what is swept.
    supposed: what reuse would make of it, where it has or tells none.
    measured: break-evens that were measured, of these or other machines.
    kv_bytes_per_token: of the model served, in its KVCache's dtype.
  """

  title: str
  trace: str
  trace_format: str
  errors: tuple[str, ...]
  statistics: TraceStatistics
  reuse: Reuse | None
  even: BreakEven
  simulated: Simulated
  systems: tuple[System, ...]
  sweeps: dict[str, tuple[Tried, ...]]
  verdict: Verdict
  kv_bytes_per_token: int
  seconds: float
  supposed: tuple[Supposed, ...] = ()
  measured: tuple[Measured, ...] = ()

# SPDX-License-Identifier: Apache-2.0
"""The study: reuse, break-even, alternatives, sweeps, cases, verdict."""

from collections.abc import Mapping
from dataclasses import replace

from mooncake_jax.assess.assessed import Simulated
from mooncake_jax.assess.assessed import Tried
from mooncake_jax.assess.supposed import SHARES
from mooncake_jax.assess.supposed import sharing
from mooncake_jax.assess.supposed import Supposed
from mooncake_jax.assess.verdict import best
from mooncake_jax.assess.verdict import Family
from mooncake_jax.assess.verdict import PREDICTED
from mooncake_jax.assess.verdict import System
from mooncake_jax.assess.window import busiest
from mooncake_jax.costs.links import with_bandwidth
from mooncake_jax.costs.model import Link
from scripts.assessment.alternatives import apart
from scripts.assessment.alternatives import coupled
from scripts.assessment.alternatives import groupings
from scripts.assessment.alternatives import mooncake
from scripts.assessment.alternatives import otherwise
from scripts.assessment.alternatives import splits
from scripts.assessment.alternatives import with_cpp
from scripts.assessment.alternatives import with_rejection
from scripts.assessment.searches import Found
from scripts.assessment.searches import Job
from scripts.assessment.searches import Pool
from scripts.assessment.spec import Assessment
from scripts.experiment import Experiment
from scripts.workloads import Rows
from scripts.workloads import TraceWorkload

DRAM = (0.05, 0.2, 0.5, 1.0)
BANDWIDTH = (0.05, 0.1, 0.25, 1.0)
NETWORK: tuple[Link, ...] = ('copy', 'handoff')
CPP, REJECTION = 'Mooncake + CPP', 'Mooncake + early rejection'


class Study:
  """Simulates one part of a trace on `nodes` nodes."""

  def __init__(
    self,
    assessment: Assessment,
    nodes: int,
    whole: Rows,
    duration_s: float,
    pool: Pool,
  ):
    """`assessment` is of the part, `whole` the trace that it is of."""
    self._assessment, self._nodes = assessment, nodes
    workload = assessment.experiment.workload
    assert isinstance(workload, TraceWorkload) and isinstance(
      workload.rows, Rows
    )
    self._warmup = int(assessment.warmup * len(workload.rows.rows))
    # The part must last: a burst shorter than an answer shows no limit.
    self.most_scale = max(1.0, duration_s / assessment.least_s)
    self._whole, self._pool = whole, pool
    self.systems: list[System] = []
    self.sweeps: dict[str, tuple[Tried, ...]] = {}
    self._experiments: dict[str, Experiment] = {}
    self._scales: dict[str, float] = {}

  def run(self) -> None:
    """All simulations; `systems` and `sweeps` are there then."""
    split = self._alternatives()
    self._variants(split)
    self._sweep_memory_and_network(split)
    self._cases()

  def _alternatives(self) -> int:
    """Coupled pools, and both families over P:D; the store's best split."""
    pools = coupled(self._assessment, self._nodes)
    tried = splits(self._nodes)
    jobs = {
      **{('coupled', name, 0): self._job(e) for name, e in pools.items()},
      **{('apart', '', n): self._job(self._apart(n)) for n in tried},
      **{('store', '', n): self._job(self._mooncake(n)) for n in tried},
    }
    found = self._pool.run(jobs, 'systems')
    for (family, name, _), each in found.items():
      if family == 'coupled':
        self._add('coupled', name, pools[name], each)
    best = {
      family: max(tried, key=lambda n: _rank(found[family, '', n]))
      for family in ('apart', 'store')
    }
    n, m = best['apart'], best['store']
    self._add('apart', 'P/D, no store', self._apart(n), found['apart', '', n])
    self._add('store', 'Mooncake', self._mooncake(m), found['store', '', m])
    self.sweeps['prefill : decode nodes'] = tuple(
      _tried(
        'Mooncake' if family == 'store' else 'P/D, no store',
        f'{prefill} : {self._nodes - prefill}',
        each,
      )
      for (family, _, prefill), each in found.items()
      if family != 'coupled'
    )
    return m

  def _variants(self, split: int) -> None:
    """CPP over sizes and numbers of its groups; early rejection."""
    of, nodes = self._assessment, self._nodes
    groups = {
      f'{count} x {size} : {nodes - count * size}': with_cpp(
        of, nodes, size, count
      )
      for size, count in groupings(nodes, split)
    }
    refusing = {REJECTION: with_rejection(of, nodes, split)}
    start = self._scales['Mooncake'] or 1.0
    made = {**groups, **refusing}
    jobs = {name: self._job(e, start, near=True) for name, e in made.items()}
    own = {
      (name, 'own'): self._job(e, searches=False) for name, e in made.items()
    }
    found = self._pool.run({**jobs, **own}, 'variants')
    chosen = {REJECTION: REJECTION}
    if groups:
      chosen[CPP] = max(groups, key=lambda name: _rank(found[name]))
      self.sweeps['CPP: groups x prefill nodes of each : decode nodes'] = tuple(
        _tried(CPP, name, found[name]) for name in groups
      )
    for name, key in chosen.items():
      at_own = found[key, 'own'].first
      self._add('store', name, made[key], replace(found[key], first=at_own))

  def suppose(self) -> tuple[Supposed, ...]:
    """What store and caches would make of prompts that share so much.

    `run` comes before. The store's split is searched again downwards: where
    more is reused, fewer prefill nodes are needed.
    """
    prefill = self._experiments['Mooncake'].cluster.prefill_instances
    tried = {prefill, max(1, prefill // 2), max(1, prefill - 1)}
    jobs = {}
    for share in SHARES:
      for n in tried:
        there = self._sharing(self._mooncake(n), share)
        jobs[share, 'store', n] = self._near(there, 'Mooncake')
      name, experiment = self._caching()
      there = self._sharing(experiment, share)
      jobs[share, 'coupled', name] = self._near(there, name)
    found = self._pool.run(jobs, 'supposed reuse')
    apart = best(self.systems, 'apart').rate
    return tuple(_supposed(share, found, apart) for share in SHARES)

  def _caching(self) -> tuple[str, Experiment]:
    """The best of the coupled pools that cache prefixes."""
    found = {
      name: experiment
      for name, experiment in self._experiments.items()
      if experiment.vllm is not None and experiment.vllm.prefix_caching
    }
    name = max(found, key=lambda each: self._scales[each])
    return name, found[name]

  def _near(self, experiment: Experiment, name: str) -> Job:
    """A search that begins at the goodput of the system of that name."""
    return self._job(experiment, self._scales[name] or 1.0, near=True)

  def _sharing(self, experiment: Experiment, share: float) -> Experiment:
    workload = self._assessment.experiment.workload
    assert isinstance(workload, TraceWorkload)
    assert isinstance(workload.rows, Rows)
    size = experiment.cluster.block_size_tokens
    rows = Rows(sharing(workload.rows.rows, share, size), [], size)
    return replace(
      experiment, workload=self._assessment.of(rows).experiment.workload
    )

  def _sweep_memory_and_network(self, split: int) -> None:
    """At full Mooncake's goodput: what less memory or bandwidth costs."""
    whole, start = self._mooncake(split), self._scales['Mooncake'] or 1.0
    memory, network = 'DRAM a node', 'network of a node'
    jobs = {
      **{
        (memory, f'{size / 1e9:,.0f} GB'): self._once(
          replace(whole, cluster=replace(whole.cluster, host_bytes=size)), start
        )
        for share in DRAM
        for size in [round(whole.cluster.host_bytes * share)]
      },
      **{
        (network, f'{rate / 1e9:.1f} GB/s'): self._once(experiment, start)
        for share in BANDWIDTH
        for rate, experiment in [_with_network(whole, share)]
      },
    }
    found = self._pool.run(jobs, 'sweeps')
    for sweep in (memory, network):
      self.sweeps[f'{sweep}, at {start:.2f} of the own rate'] = tuple(
        _tried('Mooncake', value, each)
        for (of, value), each in found.items()
        if of == sweep
      )

  def _cases(self) -> None:
    """The best of each family where things are not as predicted."""
    jobs = {}
    families: tuple[Family, ...] = ('coupled', 'apart', 'store')
    for family in families:
      name = best(self.systems, family).name
      start = self._scales[name] or 1.0
      for case, experiment in self._otherwise(name).items():
        jobs[name, case] = self._job(experiment, start, near=True)
    found = self._pool.run(jobs, 'cases')
    self.systems = [
      replace(
        system,
        goodputs={
          **system.goodputs,
          **{
            case: each.requests_per_s
            for (name, case), each in found.items()
            if name == system.name
          },
        },
      )
      for system in self.systems
    ]

  def _otherwise(self, name: str) -> dict[str, Experiment]:
    assessment, experiment = self._assessment, self._experiments[name]
    error = assessment.simulator_error + assessment.cost_error
    cases = otherwise(experiment, error, assessment.noise)
    rows = self._whole.rows
    assert assessment.num_requests is not None
    _, second = busiest(rows, assessment.num_requests, after=1)
    if second:
      again = assessment.of(
        Rows(second, [], self._whole.tokens_per_hash_id)
      ).experiment.workload
      cases['the next busiest part'] = replace(experiment, workload=again)
    return cases

  def _mooncake(self, prefill: int) -> Experiment:
    return mooncake(self._assessment, self._nodes, prefill)

  def _apart(self, prefill: int) -> Experiment:
    return apart(self._assessment, self._nodes, prefill)

  def _job(
    self,
    experiment: Experiment,
    start: float = 1.0,
    searches: bool = True,
    near: bool = False,
  ) -> Job:
    of = self._assessment
    return Job(
      experiment,
      of.target,
      of.tolerance,
      start,
      searches,
      near,
      self.most_scale,
      self._warmup,
    )

  def _once(self, experiment: Experiment, start: float) -> Job:
    return self._job(experiment, start, searches=False)

  def _add(
    self, family: Family, name: str, experiment: Experiment, found: Found
  ) -> None:
    """`found.first` is at the workload's own rate."""
    first = found.first
    self._experiments[name], self._scales[name] = experiment, found.scale
    self.systems.append(
      System(
        name,
        family,
        {PREDICTED: found.requests_per_s},
        first.effective_request_capacity,
        first.hit_rate,
        first.ttft_s['p90'],
        first.tbt_tail_s['p90'],
        refuses=experiment.conductor.admission != 'none'
        and experiment.vllm is None,
        chunks=experiment.vllm is not None and experiment.vllm.chunked_prefill,
      )
    )


def simulated(
  assessment: Assessment,
  nodes: int,
  first: int,
  part: Rows,
  hit_rate: float | None,
) -> Simulated:
  """What part it is and what it is held to."""
  span_s = max(part.rows[-1].timestamp_s, 1e-3)
  slo = assessment.experiment.slo
  return Simulated(
    len(part.rows),
    first,
    span_s,
    (len(part.rows) - 1) / span_s,
    hit_rate,
    nodes,
    slo.ttft_s,
    slo.tbt_s,
    assessment.target,
  )


def _supposed(
  share: float, found: Mapping[tuple, Found], apart: float
) -> Supposed:
  """Each family's best at that share."""
  of = {key: each for key, each in found.items() if key[0] == share}
  store = max((e for k, e in of.items() if k[1] == 'store'), key=_rank)
  coupled = max(e.requests_per_s for k, e in of.items() if k[1] == 'coupled')
  hit_rate = store.summary.hit_rate or 0.0
  return Supposed(share, hit_rate, store.requests_per_s, coupled, apart)


def _rank(found: Found) -> tuple[float, float]:
  return found.requests_per_s, found.first.effective_request_capacity


def _tried(system: str, value: str, found: Found) -> Tried:
  summary = found.summary
  return Tried(
    system,
    value,
    found.requests_per_s,
    summary.effective_request_capacity,
    summary.hit_rate,
    summary.ttft_s['p90'],
  )


def _with_network(
  experiment: Experiment, share: float
) -> tuple[float, Experiment]:
  """With so much of the bandwidth of all that leaves a node."""
  costs = with_bandwidth(experiment.costs, share, NETWORK)
  extra_s = costs.transfer_s(2 << 30, 'copy') - costs.transfer_s(
    1 << 30, 'copy'
  )
  return (1 << 30) / extra_s, replace(experiment, costs=costs)

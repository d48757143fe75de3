# SPDX-License-Identifier: Apache-2.0
"""Ten minutes of everything on the real engine: nothing may leak or be lost.

Rounds of mixed requests with cancels, losses, drains and joins, on pools and
tiers that are too small. After each round, when nothing is under way, pages,
blocks, threads, arrays and memory are counted.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
import gc
from pathlib import Path
import resource
import tempfile
import threading

import jax
import numpy as np

from mooncake_jax.blocks.segments import medium
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.costs.model import PolynomialCost
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.metrics.summary import is_effective
from mooncake_jax.model.params import init_params
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import RequestRecord
from mooncake_jax.serve import serve
from mooncake_jax.slo import SLO
from scripts.benches.rows import Row
from scripts.benches.soak_load import Clients
from scripts.benches.soak_load import Trouble
from scripts.device import instance_specs

SECONDS, QUICK_SECONDS, ROUND_S = 600.0, 60.0, 6.0
NUM_CLIENTS = 16
CONFIG = ModelConfig(
  'llama',
  vocab_size=512,
  model_dim=128,
  mlp_dim=256,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=32,
  max_tokens=256,
)
BLOCK_BYTES = 16 * 4 * 2 * 2 * 32 * 4
SLO_HERE = SLO(ttft_s=5.0, tbt_s=1.0)
# RSS may rise by this share of itself over all rounds after the first third.
RSS_RISE = 0.02
# Why a request may fail where instances are lost.
EXPECTED = ('was lost', 'takes no requests')
# A rough belief: placements have to be spread, not right.
COSTS = PolynomialCost(
  *(1e-3, 0.0, 1e-5, 0.0, 2e-3, 1e-4, 0.0),
  onload_bytes_per_s=1e9,
  offload_bytes_per_s=1e9,
  copy_bytes_per_s=1e9,
  handoff_bytes_per_s=1e9,
)


def spec_in(folder: Path) -> ClusterSpec:
  """Two and two instances, whose pools and tiers are always full."""
  return ClusterSpec(
    block_size_tokens=16,
    page_tokens=8,
    chunk_tokens=64,
    layers_per_transfer=2,
    prefill_pool_tokens=512,
    decode_pool_tokens=768,
    device_cache_tokens=256,
    max_batch=4,
    host_bytes=32 * BLOCK_BYTES,
    ssd_bytes=64 * BLOCK_BYTES,
    ssd_url=folder.as_uri(),
    request_timeout_s=60.0,
    lease_s=0.3,
  )


@dataclass(frozen=True)
class Resources:
  """What there is while nothing is under way.

  Attributes:
    pages: held by runs, of all pools.
    block_bytes: in host memory and on SSDs beyond what the Master knows of.
    arrays: on devices, but for blocks in host memory.
    rss_bytes: of the process.
  """

  pages: int
  block_bytes: int
  threads: int
  arrays: int
  rss_bytes: int


@dataclass
class Found:
  """What a soak gave."""

  seconds: float = 0.0
  rounds: list[Resources] = field(default_factory=list)
  before: Resources | None = None
  after: Resources | None = None
  outcomes: Counter[str] = field(default_factory=Counter)
  failures: Counter[str] = field(default_factory=Counter)
  trouble: Counter[str] = field(default_factory=Counter)
  asked: int = 0
  effective: int = 0
  output_tokens: int = 0
  ended_twice: int = 0

  def count(self, records: list[RequestRecord]) -> None:
    """Takes the records of a round."""
    for record in records:
      self.outcomes[record.outcome] += 1
      self.effective += is_effective(record, SLO_HERE)
      self.output_tokens += record.num_output_tokens
      if record.outcome in ('failed', 'rejected'):
        self.failures[record.reason] += 1


def soak(quick: bool) -> list[Row]:
  """Ten minutes, or one."""
  return rows(run(QUICK_SECONDS if quick else SECONDS))


def run(seconds: float, round_s: float = ROUND_S) -> Found:
  """Soaks a fresh cluster for so long, all rounds together."""
  found = Found()
  with _cluster() as (cluster, backend):
    conductor = Conductor(
      ConductorSpec(admission='none'), cluster.spec, CONFIG, COSTS, SLO_HERE
    )
    clients = Clients(cluster, CONFIG.vocab_size, NUM_CLIENTS, seed=0)
    trouble = Trouble(cluster, clients, seed=1)
    found.before = resources(cluster, backend)
    while (now_s := backend.now_s()) < seconds:
      clients.until_s = min(now_s + round_s, seconds)
      records, _ = serve(
        clients.initial(),
        conductor,
        cluster,
        clients.follow_up,
        trouble.on_event,
      )
      found.count(records)
      del records
      trouble.repair(conductor.observe)
      _settle(cluster, conductor)
      found.ended_twice += sum(n > 1 for n in trouble.ends.values())
      trouble.ends.clear()
      found.rounds.append(resources(cluster, backend))
    found.seconds = backend.now_s()
    found.asked, found.trouble = clients.asked, trouble.done
    for segment in cluster.master.segments():
      if medium(segment) != 'device':
        cluster.lose_segment(segment)
    _settle(cluster, conductor)
    found.after = resources(cluster, backend)
    conductor.view.check()
  return found


@contextmanager
def _cluster() -> Iterator[tuple[Cluster, DeviceBackend]]:
  params = init_params(CONFIG, jax.random.key(0))
  with tempfile.TemporaryDirectory() as folder:
    spec = spec_in(Path(folder))
    specs = instance_specs(spec, CONFIG)
    with DeviceBackend(CONFIG, spec.layout(CONFIG), specs, params) as backend:
      warmup(backend)
      yield Cluster(spec, CONFIG, backend, costs=COSTS), backend


def _settle(cluster: Cluster, conductor: Conductor) -> None:
  """Until nothing is under way, and dead leases have run out."""
  until_s = cluster.backend.now_s() + cluster.spec.lease_s
  while not cluster.idle or cluster.backend.now_s() < until_s:
    for event in cluster.step(cluster.backend.now_s() + 0.1):
      conductor.observe(event)
  cluster.check()


def resources(cluster: Cluster, backend: DeviceBackend) -> Resources:
  """Counts while nothing is under way."""
  gc.collect()
  known = {s.name: s.used_bytes for s in cluster.master.statistics().segments}
  extra = 0
  for name, instance in backend.instances.items():
    extra += instance.segment.used_bytes - known.get(name, 0)
    if instance.ssd is not None:
      there = instance.ssd.segment.used_bytes
      extra += there - known.get(instance.ssd.segment.name, 0)
  instances = (*cluster.prefill.values(), *cluster.decode.values())
  held = sum(i.pool.capacity - i.pool.num_free for i in instances)
  caches = [i.cache for i in cluster.prefill.values()]
  held -= sum(cache.num_pages for cache in caches if cache is not None)
  return Resources(
    held,
    extra,
    threading.active_count(),
    len(jax.live_arrays()),
    _rss_bytes(),
  )


def _rss_bytes() -> int:
  pages = int(Path('/proc/self/statm').read_text().split()[1])
  return pages * resource.getpagesize()


def rows(found: Found) -> list[Row]:
  """What a soak gave; whatever leaks misses its target."""
  before, after = found.before, found.after
  assert before is not None and after is not None
  every = [before, *found.rounds, after]
  ended = sum(found.outcomes.values()) - found.outcomes['running']
  odd = Counter(
    {
      why: count
      for why, count in found.failures.items()
      if not any(words in why for words in EXPECTED)
    }
  )
  hours = f'{found.seconds:.0f} s, {len(found.rounds)} rounds'

  def none(name: str, value: float, what: str = '') -> Row:
    return Row(f'soak.{name}', value, '', what, 0.0, at_most=True)

  return [
    Row('soak.requests', found.asked, '', f'{hours}; {_told(found.outcomes)}'),
    Row('soak.trouble', found.trouble.total(), '', _told(found.trouble)),
    Row('soak.goodput', found.effective / found.seconds, 'requests/s'),
    Row('soak.output', found.output_tokens / found.seconds, 'tokens/s'),
    none('unaccounted', abs(found.asked - ended), 'requests without one end'),
    none('ended_twice', found.ended_twice, 'tries'),
    none('odd_failures', odd.total(), _told(odd)),
    none('pages', max(r.pages for r in every), 'held by nobody'),
    none('block_bytes', max(abs(r.block_bytes) for r in every), 'unknown'),
    none('threads', max(r.threads for r in every) - before.threads),
    none('arrays', after.arrays - before.arrays, f'of {before.arrays}'),
    _rss_row(found.rounds),
  ]


def _told(counts: Counter[str]) -> str:
  return ', '.join(f'{count} {name}' for name, count in counts.most_common(4))


def _rss_row(rounds: list[Resources]) -> Row:
  """How much the process grew after the first third, of its size.

  By the median of all slopes between two rounds, which single jumps do not
  move (Theil and Sen).
  """
  rss = np.array([r.rss_bytes for r in rounds[len(rounds) // 3 :]], float)
  name, what = 'soak.rss_rise', 'after the first third, of the RSS'
  if len(rss) < 2:
    return Row(name, None, 'ratio', 'too few rounds')
  i, j = np.triu_indices(len(rss), 1)
  slope = float(np.median((rss[j] - rss[i]) / (j - i)))
  rise = slope * (len(rss) - 1) / rss[0]
  what += f' of {rss[0] / 1e6:.0f} MB'
  return Row(name, rise, 'ratio', what, RSS_RISE, at_most=True)

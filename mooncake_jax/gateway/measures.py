# SPDX-License-Identifier: Apache-2.0
"""The server's figures for Prometheus; none names a request or a tenant."""

from prometheus_client import CollectorRegistry
from prometheus_client import Counter
from prometheus_client import Gauge
from prometheus_client import generate_latest
from prometheus_client import Histogram

from mooncake_jax.gateway.choice import Choice
from mooncake_jax.gateway.watching import Snapshot
from mooncake_jax.metrics.latency import tbt_tail_s
from mooncake_jax.metrics.latency import tpot_s
from mooncake_jax.request import RequestRecord
from mooncake_jax.serve import Decision
from mooncake_jax.slo import SLO

TTFT_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 2, 5, 10, 20, 30, 60, 120)
TBT_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)


class Measures:
  """Counts requests as they end; a `driver.Watcher`. Has its own registry."""

  def __init__(self, slo: SLO):
    self.registry = CollectorRegistry()
    self._slo = slo
    self._requests = self._counter('requests', 'by outcome', 'outcome')
    self._rejections = self._counter('rejections', 'by reason', 'reason')
    self._effective = self._counter('effective_requests', 'within the SLO')
    self._prompt = self._counter(
      'prompt_tokens', 'by where their KVCache came from', 'source'
    )
    self._output = self._counter('output_tokens', 'emitted')
    self._ttft = self._histogram(
      'ttft_seconds', 'arrival to first token', TTFT_BUCKETS_S
    )
    self._tbt = self._histogram(
      'tbt_seconds',
      'mean of the longest 10 % of token intervals of a request',
      TBT_BUCKETS_S,
    )
    self._tpot = self._histogram(
      'tpot_seconds', 'mean token interval of a request', TBT_BUCKETS_S
    )
    self._open = self._gauge('open_requests', 'under way')
    self._queued = self._gauge(
      'queued_requests', 'that wait for a prefill instance', 'instance'
    )
    self._rows = self._gauge(
      'decode_rows', 'that a decode instance steps', 'instance'
    )
    self._pages = self._gauge(
      'free_pages', 'of an instance on its devices', 'instance'
    )
    self._used = self._gauge(
      'store_used_bytes', 'of a segment', 'segment', 'medium'
    )
    self._capacity = self._gauge(
      'store_capacity_bytes', 'of a segment', 'segment', 'medium'
    )
    self._hits = self._gauge(
      'store_hit_blocks', 'read since the start', 'medium'
    )
    self._misses = self._gauge('store_missed_blocks', 'since the start')
    self._link_bytes = self._gauge(
      'link_bytes', 'carried since the start', 'link', 'instance'
    )
    self._link_s = self._gauge(
      'link_used_seconds', 'since the start', 'link', 'instance'
    )

  def decided(self, choice: Choice, decision: Decision) -> None:
    """Counted when they end."""

  def ended(self, choice: Choice, record: RequestRecord) -> None:
    outcome = record.outcome
    self._requests.labels(outcome).inc()
    if outcome in ('rejected', 'rejected_late'):
      self._rejections.labels(record.reason).inc()
    reused = sum(record.reused_tokens.values())
    for tier, tokens in record.reused_tokens.items():
      self._prompt.labels(tier).inc(tokens)
    if record.prefill_done_s is not None:
      self._prompt.labels('computed').inc(record.prompt_tokens - reused)
    self._output.inc(record.num_output_tokens)
    ttft_s, tbt_s, mean_s = record.ttft_s, tbt_tail_s(record), tpot_s(record)
    if ttft_s is not None:
      self._ttft.observe(ttft_s)
    if tbt_s is not None and mean_s is not None:
      self._tbt.observe(tbt_s)
      self._tpot.observe(mean_s)
    if outcome == 'completed' and all(self._slo.kept(ttft_s, tbt_s)):
      self._effective.inc()

  def page(self, now: Snapshot, num_open: int) -> bytes:
    """All figures in Prometheus' text format."""
    self._open.set(num_open)
    for gauge in (
      self._queued,
      self._rows,
      self._pages,
      self._used,
      self._capacity,
    ):
      gauge.clear()  # of those that have left, or changed their role
    for instance in now.instances:
      gauge = self._queued if instance.role == 'prefill' else self._rows
      count = instance.queued if instance.role == 'prefill' else instance.rows
      gauge.labels(instance.name).set(count)
      self._pages.labels(instance.name).set(instance.free_pages)
    for use in now.segments:
      self._used.labels(use.name, use.medium).set(use.used_bytes)
      self._capacity.labels(use.name, use.medium).set(use.capacity_bytes)
    for medium, blocks in now.hits.items():
      self._hits.labels(medium).set(blocks)
    self._misses.set(now.misses)
    for (kind, instance), link in now.links.items():
      self._link_bytes.labels(kind, instance).set(link.num_bytes)
      self._link_s.labels(kind, instance).set(link.used_s)
    return generate_latest(self.registry)

  def _counter(self, name: str, what: str, *labels: str) -> Counter:
    return Counter(f'mooncake_{name}', what, labels, registry=self.registry)

  def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
    return Gauge(f'mooncake_{name}', what, labels, registry=self.registry)

  def _histogram(
    self, name: str, what: str, buckets: tuple[float, ...]
  ) -> Histogram:
    return Histogram(
      f'mooncake_{name}', what, buckets=buckets, registry=self.registry
    )

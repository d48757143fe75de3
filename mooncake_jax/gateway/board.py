# SPDX-License-Identifier: Apache-2.0
"""A server's state for whoever may look, as one JSON document."""

import asyncio
from collections.abc import Sequence
import json
import time
from typing import Any

from mooncake_jax.cluster import Cluster
from mooncake_jax.gateway import status
from mooncake_jax.gateway.driver import Driver
from mooncake_jax.gateway.tenants import Quota
from mooncake_jax.gateway.watching import Recent
from mooncake_jax.gateway.watching import Seen
from mooncake_jax.metrics.finite import finite
from mooncake_jax.metrics.table import flat
from mooncake_jax.metrics.table import number

# Looked at once in so long, however many watch.
FRESH_S = 0.5
MOST_RUNNING = 128
MOST_ENDED = 256


class Board:
  """An operator sees everything, a tenant its own requests and no more."""

  def __init__(self, driver: Driver, recent: Recent, title: str, mode: str):
    """`recent` is among the driver's watchers; `mode` says on what it runs."""
    self._driver = driver
    self._recent = recent
    self._title = title
    self._mode = mode
    self._looks: dict[str, tuple[float, asyncio.Task[bytes]]] = {}

  async def document(self, quota: Quota) -> bytes:
    """The document, at most `FRESH_S` old; raises as `Driver.ask`."""
    name, now_s = quota.tenant.name, time.monotonic()
    made_s, look = self._looks.get(name, (0.0, None))
    if look is None or now_s - made_s > FRESH_S:
      look = asyncio.create_task(self._look(quota))
      self._looks[name] = now_s, look
    return await asyncio.shield(look)

  async def text(self, quota: Quota) -> str:
    """The same without lists, as plain lines."""
    told = json.loads(await self.document(quota))
    for part in ('prefill', 'decode') if told['fleet'] else ():
      del told['fleet'][part]['busiest']
    del told['requests']
    figures = flat({k: v for k, v in told.items() if k != 'fleet'})
    lines = [(name, _text(value)) for name, value in figures.items()]
    lines += [(k, _text(v)) for k, v in flat(_keyed(told['fleet'])).items()]
    width = max(len(name) for name, _ in lines)
    return '\n'.join(f'{name.ljust(width)}  {value}' for name, value in lines)

  async def _look(self, quota: Quota) -> bytes:
    tenant = quota.tenant
    seen = [
      each
      for each in self._recent.all()
      if tenant.is_operator or each.owner == tenant.name
    ]
    names = [each.request_id for each in seen if each.record is None]
    running = names[-MOST_RUNNING:]
    now_s, fleet, lives = await self._driver.ask(
      lambda cluster: self._in_loop(cluster, running, tenant.is_operator)
    )
    driver = self._driver
    num_open = driver.num_open if tenant.is_operator else quota.num_open
    head = {
      'title': self._title,
      'mode': self._mode,
      'now_s': now_s,
      'running': num_open,
      'fleet': fleet,
    }
    # On a thread: streams should not wait for it.
    return await asyncio.to_thread(self._written, head, seen, lives)

  def _in_loop(
    self, cluster: Cluster, running: Sequence[str], with_fleet: bool
  ) -> tuple[float, dict[str, Any] | None, list[status.Life]]:
    now_s, book = cluster.backend.now_s(), self._driver.book
    segments = cluster.master.statistics().segments
    view = self._driver.conductor.view
    return (
      now_s,
      status.fleet(view, segments, now_s) if with_fleet else None,
      [status.life(book[name], now_s) for name in running if name in book],
    )

  def _written(
    self,
    head: dict[str, Any],
    seen: Sequence[Seen],
    running: Sequence[status.Life],
  ) -> bytes:
    ended = [each.life for each in seen if each.life is not None]
    ended = ended[-MOST_ENDED:]
    slo = self._driver.conductor.slo
    since_s = min((each['end_s'] for each in ended), default=head['now_s'])
    told = {
      **head,
      'span_s': head['now_s'] - since_s,
      'slo': {'ttft_s': slo.ttft_s, 'tbt_s': slo.tbt_s},
      'recent': status.figures(ended, slo),
      'requests': sorted([*ended, *running], key=lambda r: r['arrival_s']),
    }
    return json.dumps(finite(told), separators=(',', ':')).encode()


def _keyed(fleet: dict[str, Any] | None) -> dict[str, Any]:
  """Lists as mappings, to be told line by line."""
  if fleet is None:
    return {}
  store = {each.pop('medium'): each for each in fleet['store']}
  return {**fleet, 'store': store}


def _text(value: Any) -> str:
  return value if isinstance(value, str) else number(value)

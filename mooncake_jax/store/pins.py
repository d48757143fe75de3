# SPDX-License-Identifier: Apache-2.0
"""Pins and quotas: what eviction may not take, and what a tenant may fill."""

from collections.abc import Iterable
import math
from typing import get_args

from mooncake_jax.request import BlockKey
from mooncake_jax.store.ledger import Ledger
from mooncake_jax.store.objects import NEVER_S
from mooncake_jax.store.outcomes import Pin

SOFT_PIN_TTL_S = 1800.0  # as Mooncake Store


class Pins(Ledger):
  """The Master's pins and quotas."""

  def pin(
    self,
    keys: Iterable[BlockKey],
    pin: Pin,
    now_s: float,
    soft_pin_ttl_s: float | None = None,
  ) -> None:
    """Sets the pin of blocks at hand, 'none' to lift it; see put_start."""
    self._counts.calls['pin'] += 1
    until_s = pin_end_s(pin, soft_pin_ttl_s, now_s)
    for _, _, span in self._along(tuple(keys)):
      if span is not None:
        span.pinned_until_s = until_s
        for copy in span.copies():
          copy.segment.stuck_until_s = -math.inf

  def set_quota(self, tenant: str, limit_bytes: int | None) -> None:
    """Limits the bytes of a tenant's puts in all segments; None: no limit.

    What it has above a new limit stays until it is evicted. Copies made by
    tasks (replication, offload) and adopted blocks are charged to nobody.

    Raises:
      ValueError: a negative limit.
    """
    self._quotas.set(tenant, limit_bytes)

  def _pin_all(self, keys: Iterable[BlockKey], until_s: float) -> None:
    """Lengthens pins, as puts do."""
    if until_s == NEVER_S:
      return
    for _, _, span in self._along(tuple(keys)):
      assert span is not None
      span.pinned_until_s = max(span.pinned_until_s, until_s)


def pin_end_s(pin: Pin, soft_pin_ttl_s: float | None, now_s: float) -> float:
  if pin not in get_args(Pin):
    raise ValueError(f'{pin=} must be one of {get_args(Pin)}')
  if pin == 'none':
    return NEVER_S
  if pin == 'hard':
    return math.inf
  ttl_s = SOFT_PIN_TTL_S if soft_pin_ttl_s is None else soft_pin_ttl_s
  if not 0 < ttl_s < math.inf:
    raise ValueError(f'{soft_pin_ttl_s=} must be > 0 seconds and finite')
  return now_s + ttl_s

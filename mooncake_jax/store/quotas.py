# SPDX-License-Identifier: Apache-2.0
"""Quotas: how many bytes a tenant's copies may take, over all segments."""


class Quotas:
  """Charged as a put starts, given back as the copy goes for any reason."""

  def __init__(self):
    self.used: dict[str, int] = {}
    self.limits: dict[str, int] = {}

  def set(self, tenant: str, limit_bytes: int | None) -> None:
    """Limits a tenant; None lifts it. What it has above stays."""
    if limit_bytes is None:
      self.limits.pop(tenant, None)
    elif limit_bytes < 0:
      raise ValueError(f'{tenant=}: {limit_bytes=} must be >= 0')
    else:
      self.limits[tenant] = limit_bytes

  def over(self, tenant: str, num_bytes: int) -> int:
    """Bytes that must go before the tenant may take `num_bytes` more."""
    limit = self.limits.get(tenant)
    if limit is None:
      return 0
    return max(0, self.used.get(tenant, 0) + num_bytes - limit)

  def charge(self, tenant: str, num_bytes: int) -> None:
    self.used[tenant] = self.used.get(tenant, 0) + num_bytes

  def refund(self, tenant: str, num_bytes: int) -> None:
    left = self.used[tenant] - num_bytes
    if left:
      self.used[tenant] = left
    else:
      del self.used[tenant]

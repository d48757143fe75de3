# SPDX-License-Identifier: Apache-2.0
"""How a process reaches a Mooncake Store, as a value that configs bind."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MooncakeConfig:
  """How to reach a store.

  Attributes:
    master: 'host:port' of its master.
    host: this process's address, as other members reach it; None is loopback,
      or what an instance in a process of its own listens at.
    daemon: 'host:port' of a `mooncake_client` on this host; None makes this
      process a member itself.
    lent_bytes: memory that this process lends to the store, as a member.
    protocol, devices: 'tcp', or 'rdma' with the names of its devices.
    replicas: copies of each block on different members, best effort.
    staging_blocks: blocks that may be on their way at once.
    batch_blocks: blocks in one call at most.
    timeout_s: longest wait of a put, a read or a start.
    pause_s: after the master failed to answer, all fails at once so long.
    remove_on_drop: a dropped block is removed from the store as well, which
      others may be using.
  """

  master: str
  host: str | None = None
  daemon: str | None = None
  lent_bytes: int = 0
  protocol: str = 'tcp'
  devices: str = ''
  replicas: int = 1
  staging_blocks: int = 32
  batch_blocks: int = 16
  timeout_s: float = 5.0
  pause_s: float = 1.0
  remove_on_drop: bool = False

  def __post_init__(self):
    for field in ('master', 'daemon'):
      if (address := getattr(self, field)) is not None:
        split_address(f'MooncakeConfig.{field}', address)
    for field in ('replicas', 'staging_blocks', 'batch_blocks', 'timeout_s'):
      if not getattr(self, field) > 0:
        raise ValueError(f'MooncakeConfig.{field}={getattr(self, field)} <= 0')
    if self.daemon is not None and self.lent_bytes:
      raise ValueError(
        f'MooncakeConfig.lent_bytes={self.lent_bytes}: where daemon='
        f'{self.daemon!r} is the member, it lends the memory'
      )


def split_address(name: str, address: str) -> tuple[str, int]:
  """(host, port); ValueError naming the field unless it is 'host:port'."""
  host, _, port = address.rpartition(':')
  if not host or not port.isdigit():
    raise ValueError(f"{name}={address!r} must be 'host:port'")
  return host, int(port)

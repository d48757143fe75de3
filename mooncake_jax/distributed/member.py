# SPDX-License-Identifier: Apache-2.0
"""A process of a cluster, as its driver knows it, and what is told of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.exceptions import RayError

from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.commands import Report
from mooncake_jax.distributed.hands import ping
from mooncake_jax.distributed.launching import CALL_S
from mooncake_jax.distributed.launching import Launched
from mooncake_jax.request import BlockKey

PINGS = 16


@dataclass(frozen=True)
class Lost:
  """An instance's process is no more, or says nothing."""

  why: str


@dataclass(frozen=True)
class Joined:
  """An instance was started again and listens at `address`."""

  address: Address


News = Report | Lost | Joined


@dataclass(eq=False)
class Member:
  """One process.

  Attributes:
    process: the name of its first instance.
    launched: its actor.
    addresses: where its instances listen, by name.
    left: blocks that they found of an earlier process or driver, by segment.
    last: what they told last.
  """

  process: str
  launched: Launched
  addresses: Mapping[str, Address]
  process_id: int
  heard_s: float
  left: dict[str, list[tuple[BlockKey, int]]]
  last: dict[str, Report] = field(default_factory=dict)


def meet(process: str, launched: Launched, patience_s: float) -> Member:
  """Waits until a process is there, and tells it the time.

  Raises:
    RuntimeError: it did not start within `patience_s`; it is ended.
  """
  actor = launched.actor
  try:
    addresses: Any = ray.get(actor.addresses.remote(), timeout=patience_s)
    ahead_s = ping(
      PINGS, lambda: ray.get(actor.clock_s.remote(), timeout=CALL_S)
    )
    ray.get(actor.set_clock.remote(ahead_s), timeout=CALL_S)
    process_id: Any = ray.get(actor.process_id.remote(), timeout=CALL_S)
    left: Any = ray.get(actor.left.remote(), timeout=patience_s)
  except RayError as error:
    launched.end()
    why = 'it took too long' if isinstance(error, GetTimeoutError) else error
    raise RuntimeError(f'instance {process!r} did not start: {why}') from error
  found = {name: (host, port) for name, (host, port) in addresses.items()}
  return Member(process, launched, found, process_id, time.monotonic(), left)

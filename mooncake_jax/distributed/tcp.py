# SPDX-License-Identifier: Apache-2.0
"""Bytes over the socket of the messages: slower than others, runs anywhere."""

from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import nullcontext
from typing import Any

import numpy as np

from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.channel import raw_views
from mooncake_jax.distributed.mover import Inlet
from mooncake_jax.distributed.mover import Offer
from mooncake_jax.distributed.mover import Outlet
from mooncake_jax.distributed.spec import MoverName


class TcpMover:
  """Over the socket itself: works anywhere."""

  name: MoverName = 'tcp'

  def outlet(self) -> Outlet:
    return _TcpOutlet()

  def inlet(self) -> Inlet:
    return _TcpInlet()

  def close(self) -> None:
    """Has nothing to let go of."""


class _TcpOutlet:
  help = None

  def offer(
    self, arrays: Sequence[np.ndarray], hold_s: float
  ) -> AbstractContextManager[Offer]:
    return nullcontext(Offer(payload=raw_views(arrays)))

  def close(self) -> None:
    """The channel is another's."""


class _TcpInlet:
  joins = False

  def fetch(
    self,
    note: Mapping[str, Any],
    first: int,
    into: Sequence[np.ndarray],
    channel: Channel,
    stall_s: float,
  ) -> None:
    channel.fill(raw_views(into))

  def skip(
    self,
    note: Mapping[str, Any],
    first: int,
    sizes: Sequence[int],
    channel: Channel,
  ) -> None:
    channel.skip(sum(sizes))

  def close(self) -> None:
    """The channel is another's."""

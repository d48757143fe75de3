# SPDX-License-Identifier: Apache-2.0
"""How bytes get from one process to another: one interface, several ways.

The message that offers a part goes over a `Channel` in any case; a mover
brings the bytes, over the same socket or past it.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from dataclasses import field
import threading
import time
from typing import Any
from typing import Generic
from typing import Protocol
from typing import TypeVar

import numpy as np

from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.spec import MoverName

T = TypeVar('T')


@dataclass(frozen=True)
class Offer:
  """What the other side is told so that it can fetch.

  Attributes:
    note: plain values, in the message.
    payload: what follows the message.
  """

  note: Mapping[str, Any] = field(default_factory=dict)
  payload: Sequence[memoryview] = ()


class Held(Generic[T]):
  """Offers that were given up: the other side may just be reading them."""

  def __init__(self, let_go: Callable[[T], None]):
    """Holds none; `let_go` is what ends an offer."""
    self._let_go = let_go
    self._lock = threading.Lock()
    self._held: deque[tuple[float, T]] = deque()

  def __len__(self) -> int:
    return len(self._held)

  def hold(self, offer: T, hold_s: float) -> None:
    """Keeps an offer, at least for so long; all are kept for as long."""
    with self._lock:
      self._held.append((time.monotonic() + hold_s, offer))

  def release(self) -> None:
    """Lets go of those that were held long enough."""
    with self._lock:
      while self._held and self._held[0][0] < time.monotonic():
        self._let_go(self._held.popleft()[1])


class Outlet(Protocol):
  """The sending end of one connection."""

  def offer(
    self, arrays: Sequence[np.ndarray], hold_s: float
  ) -> AbstractContextManager[Offer]:
    """Keeps the arrays' bytes where they can be fetched, for the context.

    If that ends by an error, for `hold_s` longer: they may be read just then.
    """
    ...

  @property
  def help(self) -> Callable[[], None] | None:
    """To be called again and again while they are; None: no need."""
    ...

  def close(self) -> None: ...


class Inlet(Protocol):
  """The receiving end of one connection.

  Attributes:
    joins: whether it is quicker to fetch many arrays at once.
  """

  joins: bool

  def fetch(
    self,
    note: Mapping[str, Any],
    first: int,
    into: Sequence[np.ndarray],
    channel: Channel,
    stall_s: float,
  ) -> None:
    """Brings offered arrays, from the `first` of the offer on.

    Raises:
      OSError: they did not come, within `stall_s` where nothing moves.
      ValueError: the note is none of this mover's.
    """
    ...

  def skip(
    self,
    note: Mapping[str, Any],
    first: int,
    sizes: Sequence[int],
    channel: Channel,
  ) -> None:
    """Leaves arrays of so many bytes be, from the `first` of the offer on."""
    ...

  def close(self) -> None: ...


class Mover(Protocol):
  """One way between processes; both ends of a connection use the same."""

  name: MoverName

  def outlet(self) -> Outlet: ...

  def inlet(self) -> Inlet: ...

  def close(self) -> None: ...

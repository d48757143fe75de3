# SPDX-License-Identifier: Apache-2.0
"""This process's part in a store: joined now, or as soon as it is there.

Who may wait finds nothing in a store that can't be joined, and tries again in
the background when it is next used, each time after twice the pause: joining a
master that hangs stops the whole process for `timeout_s`.
"""

import logging
import threading
import time
from typing import NamedTuple

from mooncake_jax.transfer.mooncake_arena import Arena
from mooncake_jax.transfer.mooncake_arena import slot_stride
from mooncake_jax.transfer.mooncake_calls import Calls
from mooncake_jax.transfer.mooncake_client import MooncakeClient
from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.mooncake_errors import MooncakeError
from mooncake_jax.transfer.mooncake_errors import StoreUnreachable

MAX_PAUSES = 64  # between two tries, in `pause_s`


class Member(NamedTuple):
  """A client, its calls, and memory for what they move."""

  client: MooncakeClient
  calls: Calls
  arena: Arena

  def close(self) -> None:
    """Leaves the store; see `MooncakeClient.close`."""
    self.client.close(lambda: self.arena.num_free == self.arena.num_slots)


class Membership:
  """Any thread may call."""

  def __init__(self, config: MooncakeConfig, slot_bytes: int, waits: bool):
    """Joins, with memory of slots of this size.

    Args:
      waits: whether a store that can't be joined is tried again later.

    Raises:
      ImportError: see `MooncakeClient`.
      MooncakeError: it can't be joined, and is not waited for.
    """
    self._config = config
    self._slot_bytes = slot_bytes
    self._lock = threading.Lock()
    self._member: Member | None = None
    self._is_joining = self._is_closed = False
    self._pause_s, self._again_s = config.pause_s, 0.0
    self._why = ''
    try:
      self._member = self._join()
    except MooncakeError as error:
      if not waits:
        raise
      self._put_off(error)
      logging.getLogger(__name__).warning('without a store for now: %s', error)

  def get(self) -> Member:
    """Raises StoreUnreachable while it is not joined."""
    if self._member is None:
      self._try_again()
      raise StoreUnreachable(f'not joined yet: {self._why}')
    return self._member

  def close(self) -> None:
    """Leaves the store."""
    with self._lock:
      self._is_closed, member = True, self._member
    if member is not None:
      member.close()

  def _join(self) -> Member:
    c, stride = self._config, slot_stride(self._slot_bytes)
    client = MooncakeClient(c, stride * c.staging_blocks)
    return Member(client, Calls(client), Arena(client.memory, self._slot_bytes))

  def _try_again(self) -> None:
    with self._lock:
      is_early = time.monotonic() < self._again_s
      if is_early or self._is_joining or self._is_closed:
        return
      self._is_joining = True
    threading.Thread(
      target=self._join_late, name='mooncake-join', daemon=True
    ).start()

  def _join_late(self) -> None:
    member = None
    try:
      member = self._join()
      logging.getLogger(__name__).warning('the store was joined')
    except MooncakeError as error:
      self._put_off(error)
    finally:
      with self._lock:
        self._is_joining = False
        is_late = self._is_closed
        self._member = None if is_late else member
    if is_late and member is not None:
      member.close()

  def _put_off(self, error: MooncakeError) -> None:
    self._why = str(error)
    self._again_s = time.monotonic() + self._pause_s
    longest_s = self._config.pause_s * MAX_PAUSES
    self._pause_s = min(2 * self._pause_s, longest_s)

# SPDX-License-Identifier: Apache-2.0
"""Calls into the store that end by a deadline, whatever it does meanwhile."""

from collections.abc import Callable
from collections.abc import Sequence
import time

import numpy as np

from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.mooncake_client import MooncakeClient
from mooncake_jax.transfer.mooncake_errors import NO_ANSWER
from mooncake_jax.transfer.mooncake_errors import StoreTimeout
from mooncake_jax.transfer.mooncake_errors import StoreUnreachable
from mooncake_jax.transfer.mooncake_lane import Job

NOTHING = np.empty(0, np.uint8)


class Calls:
  """What is asked of a client; any thread may call.

  After the master failed to answer, calls fail at once for `pause_s`: a sick
  store costs one deadline, not one a block. All raise StoreUnreachable then,
  and StoreTimeout at the deadline.
  """

  def __init__(self, client: MooncakeClient):
    self._client = client
    self._timeout_s = client.config.timeout_s
    self._paused_until_s = 0.0

  def put(self, key: BlockKey, slot: np.ndarray) -> int:
    """Puts an object; returns a code < 0 if that failed."""
    return self._ask(self._client.put, [key], slot)[0]

  def get(self, key: BlockKey, slot: np.ndarray) -> int:
    """Fills a slot; returns the object's bytes or a code < 0."""
    return self._ask(self._client.get, [key], slot)[0]

  def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
    """Which objects are there; they are under lease from now on."""
    return [code == 1 for code in self._ask(self._client.exists, keys)]

  def remove(self, keys: Sequence[BlockKey], force: bool) -> list[int]:
    """Removes objects, those under lease only by force; a code each."""
    client = self._client
    return self._ask(client.remove_now if force else client.remove, keys)

  def _ask(
    self,
    run: Callable[[list[Job]], list[int]],
    keys: Sequence[BlockKey],
    slot: np.ndarray = NOTHING,
  ) -> list[int]:
    now_s = time.monotonic()
    if now_s < self._paused_until_s:
      raise StoreUnreachable('the Mooncake Store did not answer a moment ago')
    jobs = [Job(run, key.hex(), slot, now_s + self._timeout_s) for key in keys]
    client = self._client
    lane = client.put_lane if run == client.put else client.get_lane
    try:
      for job in jobs:
        lane.submit(job)
      codes = [job.result() for job in jobs]
    except StoreTimeout:
      self._pause()
      raise
    if not NO_ANSWER.isdisjoint(codes):
      self._pause()
    return codes

  def _pause(self) -> None:
    pause_s = self._client.config.pause_s
    self._paused_until_s = time.monotonic() + pause_s

# SPDX-License-Identifier: Apache-2.0
"""Calls into the store that end by a deadline, whatever it does meanwhile."""

from collections.abc import Callable
from collections.abc import Sequence
import time

import numpy as np

from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.mooncake_client import MooncakeClient
from mooncake_jax.transfer.mooncake_errors import FULL
from mooncake_jax.transfer.mooncake_errors import NO_ANSWER
from mooncake_jax.transfer.mooncake_errors import StoreTimeout
from mooncake_jax.transfer.mooncake_errors import StoreUnreachable
from mooncake_jax.transfer.mooncake_lane import Job

NOTHING = np.empty(0, np.uint8)
PAUSED = 'the Mooncake Store did not answer a moment ago'


class Calls:
  """What is asked of a client; any thread may call.

  After the master failed to answer, calls fail at once for `pause_s`: a sick
  store costs one deadline, not one a block. All raise StoreUnreachable then,
  and StoreTimeout at the deadline. A question that was given less time than
  `timeout_s` says little of the store: only questions pause after it.
  """

  def __init__(self, client: MooncakeClient):
    self._client = client
    self._timeout_s = client.config.timeout_s
    self._paused_until_s = self._probes_paused_until_s = 0.0
    self._full_until_s = 0.0

  def put(self, key: BlockKey, slot: np.ndarray) -> int:
    """Puts an object; returns a code < 0 if that failed.

    A store that had no room up to the deadline is not asked for `pause_s`.
    """
    if time.monotonic() < self._full_until_s:
      return FULL
    code = self._ask(self._client.put, [key], slot)[0]
    if code == FULL:
      self._full_until_s = time.monotonic() + self._client.config.pause_s
    return code

  def get(self, key: BlockKey, slot: np.ndarray) -> int:
    """Fills a slot; returns the object's bytes or a code < 0."""
    return self._ask(self._client.get, [key], slot)[0]

  def exists(
    self, keys: Sequence[BlockKey], timeout_s: float | None = None
  ) -> list[bool]:
    """Which objects are there; they are under lease from now on."""
    run, now_s = self._client.exists, time.monotonic()
    if now_s < self._probes_paused_until_s:
      raise StoreUnreachable(PAUSED)
    limit_s = self._timeout_s if timeout_s is None else timeout_s
    if limit_s >= self._timeout_s:
      return [code == 1 for code in self._ask(run, keys)]
    try:
      codes = self._wait(run, keys, NOTHING, now_s + limit_s)
    except StoreTimeout:
      pause_s = self._client.config.pause_s
      self._probes_paused_until_s = now_s + limit_s + pause_s
      raise
    return [code == 1 for code in codes]

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
    try:
      return self._wait(run, keys, slot, time.monotonic() + self._timeout_s)
    except StoreTimeout:
      self._pause()
      raise

  def _wait(
    self,
    run: Callable[[list[Job]], list[int]],
    keys: Sequence[BlockKey],
    slot: np.ndarray,
    deadline_s: float,
  ) -> list[int]:
    """Waits for the codes of a job a key."""
    if time.monotonic() < self._paused_until_s:
      raise StoreUnreachable(PAUSED)
    jobs = [Job(run, key.hex(), slot, deadline_s) for key in keys]
    lane = self._client.lane_of(run)
    for job in jobs:
      lane.submit(job)
    codes = [job.result() for job in jobs]
    if not NO_ANSWER.isdisjoint(codes):
      self._pause()
    return codes

  def _pause(self) -> None:
    pause_s = self._client.config.pause_s
    self._paused_until_s = time.monotonic() + pause_s

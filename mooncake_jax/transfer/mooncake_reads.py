# SPDX-License-Identifier: Apache-2.0
"""Blocks that were brought whole and are asked for in parts."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from dataclasses import field
import threading

import numpy as np


@dataclass(eq=False)
class _Read:
  """A block that comes or came, and the layers that were asked for."""

  block: Future[np.ndarray] = field(default_factory=Future)
  served: set[int] = field(default_factory=set)


class Reads:
  """Brings each block once while its layers are asked for. Any thread."""

  def __init__(self, limit: int):
    """Keeps at most `limit` blocks that were not asked for as a whole."""
    self._limit = limit
    self._lock = threading.Lock()
    self._reads: dict[int, _Read] = {}

  def get(
    self,
    replica_id: int,
    layers: tuple[int, int],
    fetch: Callable[[], np.ndarray],
  ) -> np.ndarray:
    """Returns the block [L, 2, S, K, H], fetched here or by another thread.

    Raises:
      Exception: what `fetch` raised; the replica stays lost until `forget`,
        so that its other layers cost no second wait.
    """
    with self._lock:
      read = self._reads.get(replica_id)
      is_first = read is None
      if read is None:
        read = self._reads[replica_id] = _Read()
    if is_first:
      self._trim(self._limit)
      try:
        read.block.set_result(fetch())
      except BaseException as error:
        # Without the frames of `fetch`, which refer to memory.
        read.block.set_exception(error.with_traceback(None))
    block_L2SKH = read.block.result()
    with self._lock:
      read.served.update(range(*layers))
      is_whole = len(read.served) == len(block_L2SKH)
      if is_whole and self._reads.get(replica_id) is read:
        del self._reads[replica_id]
    return block_L2SKH

  def forget(self, replica_id: int) -> None:
    with self._lock:
      self._reads.pop(replica_id, None)

  def reset(self) -> None:
    """Forgets all, also what is on its way: others get its numbers."""
    with self._lock:
      self._reads = {}

  def clear(self) -> None:
    """Forgets all blocks that came; their memory may be needed."""
    self._trim(0)

  def _trim(self, limit: int) -> None:
    with self._lock:
      came = [i for i, read in self._reads.items() if read.block.done()]
      for replica_id in came[: max(len(self._reads) - limit, 0)]:
        del self._reads[replica_id]

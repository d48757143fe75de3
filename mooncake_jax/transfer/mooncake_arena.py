# SPDX-License-Identifier: Apache-2.0
"""Registered memory in slots of one block each, reused and never copied.

First touch of memory is slow, so all of it is touched once. A slot is an
array; it is free again when nobody refers to it any more, neither the call
that fills it nor an array that was read from it.
"""

import ctypes
import math
import queue
import weakref

import numpy as np

from mooncake_jax.transfer.mooncake_errors import StoreTimeout

SLOT_ALIGNMENT = 4096


def slot_stride(slot_bytes: int) -> int:
  """Bytes from one slot to the next: whole memory pages."""
  return math.ceil(slot_bytes / SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class Arena:
  """Slots of one size. Any thread may call."""

  def __init__(self, memory: np.ndarray, slot_bytes: int):
    """Cuts memory, uint8 [n], into slots and touches all of it."""
    memory[:] = 0
    self.slot_bytes = slot_bytes
    self.num_slots = len(memory) // slot_stride(slot_bytes)
    self._memory = memory
    # Its `put` may run in a destructor, whatever lock the thread holds.
    self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in range(self.num_slots):
      self._free.put(i * slot_stride(slot_bytes))

  @property
  def num_free(self) -> int:
    return self._free.qsize()

  def take(self, timeout_s: float) -> np.ndarray:
    """Returns a free slot, uint8 [slot_bytes], with what lay there before.

    Raises:
      StoreTimeout: none came free in time.
    """
    try:
      offset = self._free.get(timeout=max(timeout_s, 0.0))
    except queue.Empty:
      raise StoreTimeout(
        f'none of {self.num_slots} staging slots came free in {timeout_s:.3f} s'
      ) from None
    address = self._memory.ctypes.data + offset
    owner = (ctypes.c_ubyte * self.slot_bytes).from_address(address)
    # The memory itself lives as long as this callback waits.
    keeper = weakref.finalize(owner, _free_slot, self._free, offset, self)
    keeper.atexit = False
    return np.ctypeslib.as_array(owner)


def _free_slot(free: queue.SimpleQueue, offset: int, _: Arena) -> None:
  free.put(offset)

# SPDX-License-Identifier: Apache-2.0
"""One prefill instance and the store that other processes share.

A request that lacks blocks here asks the store for them as soon as it queues,
and waits for the answer no longer than `probe_timeout_s`: what is not there,
or not said in time, is computed. What the instance stores is copied there
behind everything else, from its own media, so that no run waits for it and no
page is held; a block is published there once it is written, or not at all.
"""

from collections.abc import Iterable

from mooncake_jax.backend import Completion
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.instance.run import Effects
from mooncake_jax.instance.run import Probe
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.run import Start
from mooncake_jax.instance.run import Work
from mooncake_jax.instance.telling import copying
from mooncake_jax.instance.telling import dropped
from mooncake_jax.request import BlockKey
from mooncake_jax.store.client import StoreClient

# Blocks on their way there at once: until they are, they can't be evicted here.
MAX_BLOCKS = 16


class Sharing:
  """Asks the shared store for blocks, and gives it those of one instance."""

  def __init__(self, name: str, client: StoreClient, min_uses: int):
    """Begins with nothing to give.

    Args:
      min_uses: a block is given at this use; the put is the first.
    """
    self.name = name
    self._client = client
    self._beliefs = client.remote
    self._min_uses = min_uses
    self._waiting: dict[BlockKey, None] = {}
    self._is_busy = False

  def probe(self, run: Run, keys: tuple[BlockKey, ...]) -> Effects:
    """Asks for the blocks from the first on that the instance has not."""
    wanted = keys[self._beliefs.first_unsure(keys, self.name) :]
    if not wanted:
      return []
    run.is_probing = True
    return [Start(Work('probe', self.name, Probe(REMOTE, wanted), run))]

  def on_probe(
    self,
    work: Work,
    keys: tuple[BlockKey, ...],
    completion: Completion,
    now_s: float,
  ) -> Effects:
    """Takes note of what is there; no answer changes nothing."""
    assert isinstance(work.payload, Probe)
    if completion.status != 'completed':
      return []
    first = len(keys) - len(work.payload.keys)
    found, gone = self._beliefs.told(keys, first, completion.present, now_s)
    return [
      *dropped(self._client.master, gone, now_s),
      *self._client.master.events.stored(found, now_s),
    ]

  def offer(self, keys: Iterable[BlockKey], now_s: float) -> Effects:
    """Gives blocks of the instance that are used enough and not there yet."""
    for key in keys:
      if self._beliefs.lacks(key, self.name, self._min_uses):
        self._waiting[key] = None
    return self._copy(now_s)

  def on_copies(self, was_taken: bool, now_s: float) -> Effects:
    """Copies ended: goes on, unless the store took nothing at all."""
    self._is_busy = False
    if not was_taken:
      self._waiting = {}  # what is hit again is offered again
    return self._copy(now_s)

  def _copy(self, now_s: float) -> Effects:
    if self._is_busy or not self._waiting:
      return []
    keys = [*self._waiting][:MAX_BLOCKS]
    for key in keys:
      del self._waiting[key]
    tasks, evicted = self._beliefs.copies(keys, self.name, now_s)
    self._is_busy = bool(tasks)
    copies = self._client.copies(tasks, evicted)
    return copying(self._client.master, copies, now_s)

# SPDX-License-Identifier: Apache-2.0
"""Effects of what the store did: what to tell, to start and to let go."""

from collections.abc import Collection
from collections.abc import Iterable

from mooncake_jax.backend import Backend
from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.instance.run import Drop
from mooncake_jax.instance.run import Effects
from mooncake_jax.instance.run import Start
from mooncake_jax.instance.run import Work
from mooncake_jax.request import BlockKey
from mooncake_jax.store.client import Copies
from mooncake_jax.store.master import Master
from mooncake_jax.store.outcomes import Evicted
from mooncake_jax.store.setup import adopt


def copying(master: Master, copies: Copies, now_s: float) -> Effects:
  """Starts copies, as one work of the instance that gets them.

  Of one that gives them, where nobody owns what gets them.
  """
  effects = dropped(master, copies.evicted, now_s)
  if copies.ops:
    task = copies.tasks[0]
    src, dst = owner(task.src.segment), owner(task.dst.segment)
    name = src if dst == REMOTE else dst
    work = Work('copy', name, copies.ops, tasks=copies.tasks)
    effects.append(Start(work))
  return effects


def adopted(
  master: Master,
  backend: Backend,
  segment: str,
  block_bytes: int,
  now_s: float,
  known: Collection[BlockKey] | None = None,
) -> Effects:
  """Takes over what an earlier process left in a segment.

  Args:
    known: all others are let go of; None: there are none.
  """
  found = adopt(master, backend, segment, block_bytes)
  effects: Effects = [*master.events.stored(found, now_s)]
  for replica in found:
    if known is not None and replica.key not in known:
      effects += dropped(master, master.discard(replica), now_s)
  return effects


def dropped(
  master: Master, evicted: Iterable[Evicted], now_s: float
) -> Effects:
  """Tells that replicas are gone, and lets go of their bytes."""
  gone = [*evicted]
  if not gone:
    return []
  told = [e.replica for e in gone if e.was_published]
  events = master.events.evicted(told, now_s)
  return [*events, Drop(tuple([e.replica for e in gone]))]

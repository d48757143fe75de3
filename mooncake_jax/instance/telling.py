# SPDX-License-Identifier: Apache-2.0
"""Effects of what the store did: what to tell, to start and to let go."""

from collections.abc import Iterable

from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.instance.run import Drop
from mooncake_jax.instance.run import Effects
from mooncake_jax.instance.run import Start
from mooncake_jax.instance.run import Work
from mooncake_jax.store.client import Copies
from mooncake_jax.store.master import Master
from mooncake_jax.store.outcomes import Evicted


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

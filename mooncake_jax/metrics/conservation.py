# SPDX-License-Identifier: Apache-2.0
"""What goes in comes out: requests, tokens, blocks and bytes of any run.

Counted from the events alone, as they come, and held against the records and
against what the cluster says that it holds at the end.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping

from mooncake_jax.blocks.segments import Medium
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import ENDS
from mooncake_jax.events import Event
from mooncake_jax.events import Finished
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import RequestEvent
from mooncake_jax.events import Stopped
from mooncake_jax.request import RequestRecord

# Blocks by whose segment it is and of which medium.
Held = Mapping[tuple[str, Medium], int]


class NotConserved(RuntimeError):
  """A run whose figures do not add up; the message names which."""


class Conservation:
  """The counts of one run."""

  def __init__(self, held: Held):
    """Begins with the blocks that are held and were told of."""
    self._blocks = Counter(held)
    self._computed: Counter[str] = Counter()
    self._errors: list[str] = []
    self._num_requests = 0

  def took(self) -> None:
    """A request came."""
    self._num_requests += 1

  def forget(self) -> None:
    """A request has ended, and its record is not kept."""
    self._num_requests -= 1

  def observe_store(self, event: Event) -> None:
    """Counts an event that is no request's."""
    if isinstance(event, BlocksStored):
      self._blocks[event.instance, event.tier] += len(event.keys)
    elif isinstance(event, BlocksEvicted):
      self._blocks[event.instance, event.tier] -= len(event.keys)

  def computed(self, event: RequestEvent) -> None:
    """Counts prompt tokens that a try computed, be it made again or not."""
    if isinstance(event, (PrefillDone, Stopped)):
      self._computed[event.request_id] += event.computed_tokens

  def observe_request(self, event: RequestEvent, record: RequestRecord) -> None:
    """Holds an event against the record, which knows it already."""
    if event.attempt != record.attempt:
      return
    if isinstance(event, Finished):
      self._same(
        f'output tokens of {record.request_id}',
        f'{event.num_output_tokens} were emitted',
        event.num_output_tokens == record.num_output_tokens,
        f'{record.num_output_tokens} are in its record',
      )
    elif isinstance(event, PrefillDone):
      reused = sum(record.reused_tokens.values())
      again = record.recomputed_tokens
      first = self._computed[record.request_id] - again
      self._same(
        f'prompt tokens of {record.request_id}',
        f'{reused} reused and {first} computed (not counting {again} again)',
        reused + first == record.prompt_tokens,
        f'it has {record.prompt_tokens}',
      )
    if isinstance(event, ENDS):
      self._computed.pop(record.request_id, None)

  def check(
    self, records: list[RequestRecord], held: Held, leaks: list[str]
  ) -> None:
    """At the end of a run, when nothing is under way.

    Args:
      held: blocks that segments can serve, or still hold for readers.
      leaks: pages and bytes that somebody holds who should not.

    Raises:
      NotConserved: naming all that does not add up.
    """
    running = sum(record.outcome == 'running' for record in records)
    self._same(
      'requests',
      f'{self._num_requests} came',
      self._num_requests == len(records) and not running,
      f'{len(records)} have records, {running} of them no end',
    )
    self._errors += self._block_errors(held)
    if found := [*self._errors, *leaks]:
      more = f' and {len(found) - 5} more' if len(found) > 5 else ''
      raise NotConserved('; '.join(found[:5]) + more)

  def _same(self, what: str, one: str, holds: bool, other: str) -> None:
    if not holds:
      self._errors.append(f'{what}: {one}, {other}')

  def _block_errors(self, held: Held) -> Iterator[str]:
    for place in sorted(self._blocks.keys() | held.keys()):
      told, there = self._blocks[place], held.get(place, 0)
      if told != there:
        instance, tier = place
        yield (
          f'blocks of {instance} ({tier}): {told} were stored and not evicted, '
          f'{there} are there'
        )

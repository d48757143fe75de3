# SPDX-License-Identifier: Apache-2.0
"""What the instances of one process have to tell, in one answer."""

from collections.abc import Callable
from collections.abc import Sequence
import threading
from typing import Protocol

from mooncake_jax.distributed.commands import Report


class Telling(Protocol):
  """One of the instances; see `hands.Hands`.

  Attributes:
    instance: its name.
    changed: the lock under which it is asked; notified when there is news.
  """

  instance: str
  changed: threading.Condition

  def serves(self, driver: str) -> bool:
    """Whether it is that driver's."""
    ...

  def has_news(self) -> bool:
    """Whether there is anything to tell."""
    ...

  def has_end(self) -> bool:
    """Whether not all of it is of works that go on."""
    ...

  def is_due(self, silence_s: float) -> bool:
    """Whether it has told nothing for so long."""
    ...

  def take_report(self) -> Report:
    """What there is to tell; it is told then."""
    ...

  def complete(self, report: Report) -> None:
    """Adds what it takes no lock to know."""
    ...


def gathered(
  hands: Sequence[Telling], patience_s: float, driver: str, gather_s: float
) -> dict[str, Report]:
  """Waits for news of any instance of a process, at most `patience_s`.

  Are they of works that go on only, for more, at most `gather_s`. Those
  without news lack, unless they have told nothing for so long.
  """

  def refuse() -> bool:
    return not all(each.serves(driver) for each in hands)

  def wait(found: Callable[[Telling], bool], seconds: float) -> None:
    changed.wait_for(lambda: any(map(found, hands)) or refuse(), seconds)

  changed = hands[0].changed
  with changed:
    wait(lambda each: each.has_news(), patience_s)
    if gather_s:
      wait(lambda each: each.has_end(), gather_s)
    if refuse():
      return {each.instance: Report(is_refused=True) for each in hands}
    telling = [e for e in hands if e.has_news() or e.is_due(patience_s)]
    telling = telling or [*hands]
    reports = {each.instance: each.take_report() for each in telling}
  for each in telling:
    each.complete(reports[each.instance])
  return reports

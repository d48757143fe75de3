# SPDX-License-Identifier: Apache-2.0
"""A part of the check: it may fail or take too long without ending the rest."""

from collections.abc import Callable
from dataclasses import dataclass
import threading
import time
import traceback
from typing import Any

Figures = dict[str, Any]
WHOLE_S = 450.0


class Budget:
  """Seconds that a part may take; it looks here before it begins more."""

  def __init__(self, seconds: float):
    self._end_s = time.perf_counter() + seconds

  @property
  def left_s(self) -> float:
    return self._end_s - time.perf_counter()

  def fits(self, seconds: float) -> bool:
    """Whether so much is left."""
    return self.left_s > seconds


@dataclass(frozen=True)
class Part:
  """What is measured.

  Attributes:
    run: fills in the figures it is given as it finds them.
    budget_s: after it the part is left alone, wherever it is; of a check of
      `WHOLE_S` seconds.
    is_needed: without it nothing else is measured.
  """

  name: str
  run: Callable[[Figures, Budget], None]
  budget_s: float
  is_needed: bool = False


def run_part(part: Part, limit_s: float) -> Figures:
  """Its figures, with 'ok', 'seconds' and the error if it has one.

  It runs on a thread of its own: a program that never ends is left behind.
  """
  figures: Figures = {}
  failed: list[str] = []
  seconds = min(part.budget_s, limit_s)

  def run() -> None:
    try:
      part.run(figures, Budget(seconds))
    except Exception:
      failed.append(traceback.format_exc(limit=-6))

  start_s = time.perf_counter()
  thread = threading.Thread(target=run, name=part.name, daemon=True)
  thread.start()
  thread.join(seconds)
  if thread.is_alive():
    failed.append(f'not over after {seconds:.0f} s')
  found = dict(figures)  # a part left behind may still add to its own
  found['ok'] = not failed
  found['seconds'] = round(time.perf_counter() - start_s, 1)
  if failed:
    found['error'] = failed[0]
  return found

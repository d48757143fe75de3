# SPDX-License-Identifier: Apache-2.0
"""The child's side of a measurement in turns; the standard library alone.

A program that is measured runs in a process of its own, with its own
interpreter and a fixed number of threads. It reads a line of JSON
{"work": ..., arguments}, does that once and answers {"wall_s": ..., "cpu_s":
...}. So programs can take turns on one machine, and whatever else the machine
does meanwhile falls on all of them.
"""

from collections.abc import Callable
from collections.abc import Mapping
from functools import partial
import json
import os
import sys
import time
from typing import Any


class Child:
  """A program that works when it is told to."""

  def __init__(self, threads: int):
    """Call it before any numeric library is imported.

    They start as many threads as they find cores, and print what they like:
    stdout is the answers' alone, all else goes to stderr.
    """
    self._answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    _limit_threads(threads)

  def answer(self, works: Mapping[str, Callable[..., Any]], name: str) -> None:
    """Says what the program is, then works until its input ends.

    What a work returns as a dict goes along with its times.
    """
    self._say({'name': name})
    for line in sys.stdin:
      order = json.loads(line)
      work = works[order.pop('work')]
      self._say(self.timed(partial(work, **order)))

  def timed(self, work: Callable[[], Any]) -> dict[str, Any]:
    """Its times, and what it returns as a dict: times of its own win."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    found = work()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    taken = {'wall_s': wall_s, 'cpu_s': cpu_s}
    return taken | (found if isinstance(found, dict) else {})

  def _say(self, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=self._answers, flush=True)


def resident_bytes() -> int:
  """Memory of this process that is in RAM."""
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def _limit_threads(count: int) -> None:
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
  for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
    os.environ[name] = str(count)
  # A thread that spins while another program has its turn costs that one.
  os.environ['OMP_WAIT_POLICY'] = 'PASSIVE'

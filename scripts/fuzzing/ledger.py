# SPDX-License-Identifier: Apache-2.0
"""What a server holds: leaks show between two looks at it."""

import json
from pathlib import Path
import time
from typing import Any
from typing import NamedTuple
from urllib.request import urlopen

IDLE_S = 30.0
# Pools of threads fill as they are needed; connections that nobody closed yet.
_SLACK = {'threads': 8, 'files': 4}


class Held(NamedTuple):
  """Of a server's process, and of what it serves.

  Attributes:
    rss_bytes: resident memory.
    threads, files: of the process; sockets are files.
    running: requests under way.
    used_tokens: room that decode instances reserve for them.
  """

  rss_bytes: int
  threads: int
  files: int
  running: int
  used_tokens: int


def look(pid: int, url: str) -> Held:
  """What it holds now."""
  proc = Path('/proc') / str(pid)
  lines = (proc / 'status').read_text().splitlines()
  fields = dict(line.split(':', 1) for line in lines)
  status = fetch(f'{url}/status.json')
  return Held(
    int(fields['VmRSS'].split()[0]) * 1024,
    int(fields['Threads']),
    len([*(proc / 'fd').iterdir()]),
    status['running'],
    status['fleet']['decode']['used_tokens'],
  )


def settled(pid: int, url: str) -> Held:
  """What it holds once nothing is under way, or after `IDLE_S` all the same."""
  deadline_s = time.monotonic() + IDLE_S
  while True:
    held = look(pid, url)
    if not (held.running or held.used_tokens) or time.monotonic() > deadline_s:
      return held
    time.sleep(0.2)


def fetch(url: str) -> Any:
  """JSON from there."""
  with urlopen(url, timeout=IDLE_S) as answer:
    return json.load(answer)


def leaks(before: Held, after: Held, most_growth: float) -> list[str]:
  """What `after` has and should not; RSS may grow by that share."""
  found = [
    f'{name}: {getattr(after, name)} where there were {getattr(before, name)}'
    for name, slack in _SLACK.items()
    if getattr(after, name) > getattr(before, name) + slack
  ]
  found += [
    f'{name}: {getattr(after, name)} though nothing should be under way'
    for name in ('running', 'used_tokens')
    if getattr(after, name)
  ]
  growth = after.rss_bytes / before.rss_bytes - 1
  if growth > most_growth:
    found.append(f'rss_bytes: {growth:+.1%}')
  return found

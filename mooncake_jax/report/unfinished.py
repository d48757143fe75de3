# SPDX-License-Identifier: Apache-2.0
"""What a run keeps while it goes on, for one that resumes it.

`unfinished.jsonl`: an object for each part of the run, a start of a process,
and behind it the records of the requests that ended in that part, each written
at its end. A kill leaves at most a torn last line, which is dropped. The file
goes when the results are there.
"""

from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any

from mooncake_jax.report.codec import read_lines
from mooncake_jax.report.records import record_from_json
from mooncake_jax.report.records import record_to_json
from mooncake_jax.request import RequestRecord

NAME = 'unfinished.jsonl'
PART = 'part'


class Unfinished:
  """A run's parts, and its records so far.

  Attributes:
    parts: what was said of each, the one that goes on now last.
    records: of earlier parts, in the order in which they ended.
  """

  def __init__(self, folder: Path, resumes: bool, about: Mapping[str, Any]):
    """Begins a part.

    Args:
      folder: of the results; made where it is missing.
      resumes: keeps earlier parts; else there are none.
      about: what is said of this part.

    Raises:
      ValueError: a line that is neither part nor record.
    """
    self._path = folder / NAME
    self.parts: list[dict[str, Any]] = []
    self.records: list[RequestRecord] = []
    folder.mkdir(parents=True, exist_ok=True)
    if resumes and is_unfinished(folder):
      self._read()
    at_s = max((_last_s(record) for record in self.records), default=0.0)
    part = {**about, 'at_s': at_s, 'kept': len(self.records)}
    self.parts.append(part)
    self._file = self._path.open('a' if resumes else 'w')
    self._write({PART: part})

  @property
  def at_s(self) -> float:
    """Where the run's clock goes on: when the last kept record ended."""
    return self.parts[-1]['at_s']

  def keep(self, record: RequestRecord) -> None:
    """Writes a record of a request that has ended."""
    self._write(record_to_json(record))

  def close(self) -> None:
    """Leaves all as it is, to be resumed."""
    self._file.close()

  def finish(self) -> None:
    """The results are there: nothing is to be resumed."""
    self.close()
    self._path.unlink()

  def _write(self, item: Mapping[str, Any]) -> None:
    self._file.write(json.dumps(item, separators=(',', ':')) + '\n')
    self._file.flush()  # a kill of the process, not of the machine

  def _read(self) -> None:
    with self._path.open('r+b') as file:
      file.truncate(file.read().rfind(b'\n') + 1)  # of a torn last line
    for where, item in read_lines(self._path):
      if PART in item:
        self.parts.append(item[PART])
      else:
        self.records.append(record_from_json(where, item))


def is_unfinished(folder: Path) -> bool:
  """Whether a run that did not end has left its records there."""
  return (folder / NAME).exists()


def _last_s(record: RequestRecord) -> float:
  return record.arrival_s if record.finished_s is None else record.finished_s

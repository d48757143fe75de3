# SPDX-License-Identifier: Apache-2.0
"""A run that ends early goes on later, from the records that it has kept.

On devices a request that has ended is not served again: its record is kept.
What was under way or still to come is served with its arrival as it was, on a
clock that goes on where the last kept record ended, as if the time between the
processes had not been; caches begin empty (or from a snapshot) and the
Conductor knows nothing. A simulation is served anew from its beginning, as
that gives the very records of a run that was never broken.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
import os
from pathlib import Path
import signal
from typing import Any
from typing import NoReturn

from mooncake_jax.report.environment import commit
from mooncake_jax.report.unfinished import is_unfinished
from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord
from scripts import gin_source
from scripts.compare import bindings_of
from scripts.compare import config_of
from scripts.compare import different
from scripts.compare import OPERATIVE
from scripts.workloads import Prepared

# What a shell says of a process that SIGTERM ended.
PREEMPTED = 128 + signal.SIGTERM
# Which job of SLURM, and which start of it.
JOB = ('SLURM_JOB_ID', 'SLURM_RESTART_COUNT')


class Preempted(BaseException):
  """SIGTERM came: the run ends here, to be resumed."""


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
  """Raises `Preempted` in the main thread at SIGTERM; a second one kills."""

  def end(number: int, frame: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Preempted

  before = signal.signal(signal.SIGTERM, end)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)


def about(started: str) -> dict[str, Any]:
  """What is kept of a part of a run: when, of which code, as which job."""
  job = {name.lower(): os.environ[name] for name in JOB if name in os.environ}
  return {'started': started, 'commit': commit(gin_source.ROOT), **job}


def is_done(out: Path) -> bool:
  """Whether the results of a run that ended lie there."""
  return (out / 'summary.json').exists() and not is_unfinished(out)


def check_same(out: Path, operative: str) -> None:
  """Raises ValueError if what is to be resumed ran with another config."""
  if not (out / OPERATIVE).exists():
    return
  source = gin_source.Source()
  gin_source.read_text(operative, 'now', source)
  both = {'then': config_of(out), 'now': bindings_of(source)}
  for name, (then, now) in different(both).items():
    raise ValueError(
      f'--resume {out}: {name} was {then} and is {now}: a run goes on with '
      'the config that it began with'
    )


def rest_of(prepared: Prepared, kept: Sequence[RequestRecord]) -> list[Request]:
  """The requests that have no record yet, next turns of ended ones included.

  Raises:
    ValueError: a record is of no request of this workload.
  """
  ended = {record.request_id for record in kept}
  requests = [*prepared.requests]
  follow_up = prepared.follow_up
  for record in kept if follow_up is not None else ():
    assert follow_up is not None
    if (request := follow_up(record)) is not None:
      requests.append(request)
  if unknown := ended - {request.request_id for request in requests}:
    raise ValueError(
      f'request_id={min(unknown)!r} was served and is none of this workload: '
      'a run goes on with the requests that it began with'
    )
  return [r for r in requests if r.request_id not in ended]

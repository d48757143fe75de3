# SPDX-License-Identifier: Apache-2.0
"""How fast a wire is: parts that nobody wants, sent as transfers are."""

import itertools
import threading

import numpy as np

from mooncake_jax.backend import Replica
from mooncake_jax.costs.links import LinkSpeed
from mooncake_jax.costs.links import measure_link
from mooncake_jax.distributed.wire import GREETING
from mooncake_jax.distributed.wire import Wire
from mooncake_jax.transfer.far import Job
from mooncake_jax.transfer.far import JobLink
from mooncake_jax.transfer.segment import Part

MAX_BYTES = 64 << 20
PATIENCE_S = 20.0


def measure_wire(wire: Wire, link: JobLink, part: Part) -> LinkSpeed:
  """Measures a wire by parts like this one, over all its connections.

  They lie apart: the same part again and again would come out of a cache.

  Args:
    link: the wire's, whose threads send.

  Raises:
    OSError: the other side did not take them.
  """

  parts = itertools.cycle(_like(part))

  def send(count: int) -> None:
    ended, errors = threading.Semaphore(0), []
    for each in itertools.islice(parts, count):
      job = Job(
        each.num_bytes,
        lambda: True,
        lambda: None,
        errors.append,
        ended.release,
        (Replica(wire.name, GREETING, b''), each),
      )
      link.submit(job, 0)
    for _ in range(count):
      if not ended.acquire(timeout=PATIENCE_S):
        raise TimeoutError(f'{wire.name} takes longer than {PATIENCE_S:g} s')
    if errors:
      raise ConnectionError(f'{wire.name}: {errors[0]}') from errors[0]

  return measure_link(send, part.num_bytes, MAX_BYTES)


def _like(part: Part) -> list[Part]:
  """Copies of a part, of `MAX_BYTES` in all."""
  return [
    part._replace(slices=tuple(np.array(each) for each in part.slices))
    for _ in range(max(MAX_BYTES // part.num_bytes, 1))
  ]

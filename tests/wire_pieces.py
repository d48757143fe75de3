# SPDX-License-Identifier: Apache-2.0
"""A wire and where it leads to, in one process."""

from contextlib import contextmanager

import numpy as np

from mooncake_jax.backend import Replica
from mooncake_jax.distributed.landing import Landing
from mooncake_jax.distributed.offers import PartShape
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.wire import Wire
from mooncake_jax.transfer.arrivals import Arrivals
from mooncake_jax.transfer.segment import Part

SHAPE = PartShape(4, 2, 8, 64, np.dtype(np.float32))


@contextmanager
def ends(movers, secret='s', limit=1 << 20, stall_s=2.0, **kwargs):
  """A wire, where it leads to, and what arrives there."""
  spec = WireSpec(movers[0].name, stall_s=stall_s, **kwargs)
  arrivals = Arrivals(limit)
  landing = Landing(spec, SHAPE, movers[1], arrivals, 's')
  wire = Wire('b', spec, movers[0], secret)
  wire.lead_to(landing.address)
  try:
    yield wire, arrivals, landing
  finally:
    wire.close()
    arrivals.close()
    landing.close()


def part(layers=(0, 2), tokens=8, heads=(2,), seed=0, dtype='float32') -> Part:
  rng = np.random.default_rng(seed)
  start, stop = layers
  slices = tuple(
    rng.standard_normal((stop - start, 2, tokens, K, 8)).astype(dtype)
    for K in heads
  )
  return Part(start, stop, slices)


def send(wire: Wire, number: int, sent: Part) -> None:
  wire.store(Replica(wire.name, number, b''), sent)


class Got:
  """What an op hears of its parts."""

  def __init__(self, arrivals: Arrivals, number: int):
    self.parts, self.lefts, self.errors = [], [], []
    arrivals.expect(number, self._arrived, self.errors.append)

  def _arrived(self, arrived, left):
    self.parts.append(arrived)
    self.lefts.append(left)

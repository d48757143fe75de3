# SPDX-License-Identifier: Apache-2.0
"""Processes of one `jax.distributed` job: the first tells the others all.

A message names a pool, what is done on it, and the arrays that follow as bytes
(see `engine/spanning.py`). Followers say a secret that the leader has spread
by a collective; JSON and bytes, never code. Whoever is gone ends the others:
one job lives and dies together.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
import hmac
import json
import secrets
import socket
import threading
from typing import NamedTuple

import jax
from jax.experimental import multihost_utils
import numpy as np

from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.channel import raw_views
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.spanning import Follower
from mooncake_jax.engine.spanning import SpanningPool

NOTE_BYTES = 512
STALL_S = 60.0


class Told(NamedTuple):
  """What is to be done on a pool; see `spanning.Follower.do`."""

  pool: str
  what: str
  numbers: tuple[int, ...]
  arrays: tuple[np.ndarray, ...]


class Leader:
  """Tells all other processes."""

  def __init__(self, host: str):
    """Waits for them; called in all processes at once, as `Followed` is.

    Args:
      host: an address of this one that the others reach.

    Raises:
      OSError: one does not come within a minute.
    """
    self._lock = threading.Lock()
    self._channels: list[Channel] = []
    secret = secrets.token_hex(32)
    with socket.create_server((host, 0)) as server:
      server.settimeout(STALL_S)
      address = server.getsockname()[:2]
      _spread({'address': address, 'secret': secret})
      while len(self._channels) < jax.process_count() - 1:
        self._admit(server, secret)

  def _admit(self, server: socket.socket, secret: str) -> None:
    channel = Channel(server.accept()[0], STALL_S)
    said = str(channel.receive().get('secret', ''))
    if hmac.compare_digest(said.encode(), secret.encode()):
      self._channels.append(channel)
    else:
      channel.close()

  def tell(
    self,
    pool: str,
    what: str,
    numbers: Sequence[int],
    arrays: Sequence[np.ndarray],
  ) -> None:
    """Tells all. Any thread may call; OSError if one is gone."""
    message = {
      'pool': pool,
      'what': what,
      'numbers': [*map(int, numbers)],
      'arrays': [[array.dtype.name, array.shape] for array in arrays],
    }
    with self._lock:
      for channel in self._channels:
        channel.send(message, raw_views(arrays))

  def close(self) -> None:
    """Sends the others home."""
    with self._lock:
      for channel in self._channels:
        try:
          channel.send({'what': 'end'})
        except OSError:
          pass  # it is gone already
        channel.close()


class Followed:
  """The leader, as a follower sees it."""

  def __init__(self):
    """Connects; OSError if it does not answer."""
    note = _spread(None)
    host, port = note['address']
    self._channel = Channel.to((host, port), STALL_S)
    self._channel.send({'secret': note['secret']})

  def next(self) -> Told | None:
    """What it tells next, however long that takes; None at the end.

    Raises:
      OSError: it is gone.
    """
    while not self._channel.has_news(STALL_S):
      pass  # JAX's coordinator ends this process if that one is dead
    message = self._channel.receive()
    if message['what'] == 'end':
      return None
    arrays = tuple(
      np.empty(shape, jax.numpy.dtype(name))
      for name, shape in message['arrays']
    )
    self._channel.fill(raw_views(arrays))
    numbers = tuple(message['numbers'])
    return Told(message['pool'], message['what'], numbers, arrays)

  def close(self) -> None:
    self._channel.close()


@contextmanager
def led(backend: DeviceBackend, host: str) -> Iterator[None]:
  """This process tells the others what its pools do; see `Leader`."""
  leader = Leader(host)
  try:
    for name, instance in backend.instances.items():
      pool = instance.stages[0].desk.pool
      assert isinstance(pool, SpanningPool)
      pool.tell = partial(leader.tell, name)
    yield
  finally:
    leader.close()


def follow(backend: DeviceBackend) -> None:
  """Does what the first process tells, to its end.

  Raises:
    OSError: that process is gone.
  """
  followers = {}
  for name, instance in backend.instances.items():
    desk = instance.stages[0].desk
    assert isinstance(desk.pool, SpanningPool) and desk.model is not None
    followers[name] = Follower(desk.pool, desk.model)
  leader = Followed()
  while (told := leader.next()) is not None:
    followers[told.pool].do(told.what, told.numbers, told.arrays)
  leader.close()


def _spread(note: dict | None) -> dict:
  """The first process's note, in all of them."""
  text = json.dumps(note).encode().ljust(NOTE_BYTES)
  assert len(text) == NOTE_BYTES, note
  mine = np.frombuffer(text, np.uint8)
  found = np.asarray(multihost_utils.broadcast_one_to_all(mine), np.uint8)
  return json.loads(found.tobytes())

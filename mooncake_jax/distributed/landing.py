# SPDX-License-Identifier: Apache-2.0
"""The receiving end: parts that other processes send, handed to `Arrivals`.

A thread waits for connections and each connection has one; few may be open
that have not said who they are. What is offered is
held against the KVCache's own shape before any of it is taken.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
import hmac
import math
import socket
import threading
from typing import Any

import numpy as np

from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.mover import Inlet
from mooncake_jax.distributed.mover import Mover
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.wire import GREETING
from mooncake_jax.distributed.wire import VERSION
from mooncake_jax.transfer.arrivals import Arrivals
from mooncake_jax.transfer.checksum import ChecksumError
from mooncake_jax.transfer.entries import aligned
from mooncake_jax.transfer.segment import Part
from mooncake_jax.transfer.segment import verify

IDLE_S = 3600.0  # a connection may say nothing for so long
MAX_STRANGERS = 128  # connections that have not said the secret yet


@dataclass(frozen=True)
class PartShape:
  """What KVCache looks like here: parts [L, 2, S, K, H], heads in slices."""

  num_layers: int
  num_kv_heads: int
  head_dim: int
  max_tokens: int
  dtype: np.dtype

  def part(self, num_layers: int = 1, num_tokens: int = 1) -> Part:
    """One of the first layers, all ones."""
    shape = (num_layers, 2, num_tokens, self.num_kv_heads, self.head_dim)
    return Part(0, num_layers, (np.ones(shape, self.dtype),))

  def check(self, offer: '_Offered') -> None:
    """Raises ValueError unless the offer is such a part."""
    start, stop = offer.layers
    heads = 0
    for shape in offer.shapes:
      if len(shape) != 5:
        raise ValueError(f'{shape=} must be [L, 2, S, K, H]')
      L, two, S, K, H = shape
      heads += K
      fits = (L, two, H) == (stop - start, 2, self.head_dim)
      if not fits or not 0 < S <= self.max_tokens or K < 1:
        raise ValueError(f'{shape=} of layers {offer.layers} is none of {self}')
    if offer.dtype != self.dtype.name or heads != self.num_kv_heads:
      raise ValueError(
        f'dtype={offer.dtype} with {heads} KV heads is none of {self}'
      )
    if not 0 <= start < stop <= self.num_layers:
      raise ValueError(f'layers={offer.layers} of {self.num_layers}')


@dataclass(frozen=True)
class _Offered:
  """A part that another process would send."""

  number: int
  layers: tuple[int, int]
  dtype: str
  shapes: tuple[tuple[int, ...], ...]
  total: int | None
  note: Mapping[str, Any]

  @classmethod
  def of(cls, message: Mapping[str, Any]) -> '_Offered':
    """Raises ValueError if the message offers nothing."""
    try:
      start, stop = map(int, message['layers'])
      shapes = tuple(tuple(map(int, shape)) for shape in message['shapes'])
      total = None if message['total'] is None else int(message['total'])
      number, dtype = int(message['number']), str(message['dtype'])
      note = dict(message['note'])
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(f'no offer: {error!r}') from error
    return cls(number, (start, stop), dtype, shapes, total, note)

  def num_bytes(self, dtype: np.dtype) -> int:
    return sum(math.prod(shape) for shape in self.shapes) * dtype.itemsize


class Landing:
  """Listens for the cluster's other instances."""

  def __init__(
    self,
    spec: WireSpec,
    shape: PartShape,
    mover: Mover,
    arrivals: Arrivals,
    secret: str,
  ):
    """Binds and starts to listen; `secret` is what those who connect know."""
    self._spec = spec
    self._shape = shape
    self._mover = mover
    self._arrivals = arrivals
    self._secret = secret
    self._lock = threading.Lock()
    self._channels: set[Channel] = set()
    self._strangers: dict[Channel, None] = {}  # of these, the oldest first
    self._is_closed = False
    self._socket = socket.create_server((spec.bind, 0))
    self._thread = threading.Thread(
      target=self._listen, name='landing', daemon=True
    )
    self._thread.start()

  @property
  def address(self) -> Address:
    """Where it listens."""
    host, port = self._socket.getsockname()[:2]
    return host, port

  @property
  def num_connections(self) -> int:
    """Those that are open."""
    with self._lock:
      return len(self._channels)

  def close(self) -> None:
    """Ends all connections."""
    with self._lock:
      self._is_closed = True
      channels = [*self._channels]
    self._socket.shutdown(socket.SHUT_RDWR)
    self._socket.close()
    for channel in channels:
      channel.close()
    self._thread.join()

  def _listen(self) -> None:
    while True:
      try:
        sock, _ = self._socket.accept()
      except OSError:
        return  # closed
      channel = Channel(sock, self._spec.stall_s)
      with self._lock:
        if self._is_closed:
          channel.close()
          return
        self._welcome(channel)
      threading.Thread(
        target=self._serve, args=(channel,), name='arrivals', daemon=True
      ).start()

  def _welcome(self, channel: Channel) -> None:
    """Under the lock. Where too many say nothing the oldest has to go."""
    if len(self._strangers) >= MAX_STRANGERS:
      oldest = next(iter(self._strangers))
      self._forget(oldest)
      oldest.close()
    self._channels.add(channel)
    self._strangers[channel] = None

  def _forget(self, channel: Channel) -> None:
    self._channels.discard(channel)
    self._strangers.pop(channel, None)

  def _serve(self, channel: Channel) -> None:
    """One connection, to its end."""
    inlet = None
    try:
      self._greet(channel)
      with self._lock:
        self._strangers.pop(channel, None)
      inlet = self._mover.inlet()
      while True:
        offer = _Offered.of(channel.receive(IDLE_S))
        channel.send(self._answer(offer, channel, inlet))
    except (OSError, ValueError):
      pass  # the sender learns it by the end of the connection
    finally:
      with self._lock:
        self._forget(channel)
      channel.close()
      if inlet is not None:
        inlet.close()

  def _greet(self, channel: Channel) -> None:
    """Raises ValueError unless it is one of ours."""
    hello = channel.receive()
    secret, error = str(hello.get('secret', '')), ''
    if not hmac.compare_digest(secret.encode(), self._secret.encode()):
      error = 'the secret is another'
    elif hello.get('version') != VERSION:
      error = f'version {VERSION} is spoken here'
    elif hello.get('mover') != self._mover.name:
      error = f'bytes come by {self._mover.name} here'
    channel.send({'error': error})
    if error:
      raise ValueError(error)

  def _answer(
    self, offer: _Offered, channel: Channel, inlet: Inlet
  ) -> dict[str, Any]:
    """Takes an offered part, or says why not.

    Raises:
      ValueError: it is no part of this KVCache: that ends the connection.
    """
    self._shape.check(offer)
    if offer.number == GREETING:
      self._fetch(offer, channel, inlet)
      return {'status': 'landed'}
    num_bytes = offer.num_bytes(self._shape.dtype)
    if not self._arrivals.wants(offer.number):
      inlet.skip(offer.note, num_bytes, channel)
      return _refused('nobody waits for it any more')
    # Its sender waits no longer.
    if not self._arrivals.room(num_bytes, self._spec.stall_s):
      raise ConnectionAbortedError('closed, or no room')
    try:
      part = self._fetch(offer, channel, inlet)
    except BaseException as error:
      self._arrivals.give_back(num_bytes)
      if isinstance(error, ChecksumError):
        return _refused(str(error))
      raise
    self._arrivals.landed(offer.number, part)
    return {'status': 'landed'}

  def _fetch(self, offer: _Offered, channel: Channel, inlet: Inlet) -> Part:
    """Brings the bytes into memory of their own.

    Raises:
      ChecksumError: they are not what was sent.
    """
    arrays = [_empty(shape, self._shape.dtype) for shape in offer.shapes]
    inlet.fetch(offer.note, arrays, channel, self._spec.stall_s)
    part = Part(*offer.layers, tuple(arrays), offer.total)
    verify(part, f'arrival {offer.number}')
    return part._replace(total=None)


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
  num_bytes = math.prod(shape) * dtype.itemsize
  return aligned(num_bytes).view(dtype).reshape(shape)


def _refused(error: str) -> dict[str, str]:
  return {'status': 'refused', 'error': error}

# SPDX-License-Identifier: Apache-2.0
"""The receiving end: parts that other processes send, handed to `Arrivals`.

A thread waits for connections and each connection has one; few may be open
that have not said who they are. What is offered is
held against the KVCache's own shape before any of it is taken.
"""

from collections.abc import Mapping
import hmac
import socket
import threading
import time
from typing import Any

import numpy as np

from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.mover import Inlet
from mooncake_jax.distributed.mover import Mover
from mooncake_jax.distributed.offers import Offered
from mooncake_jax.distributed.offers import PartShape
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.wire import GREETING
from mooncake_jax.distributed.wire import VERSION
from mooncake_jax.transfer.arrivals import Arrivals
from mooncake_jax.transfer.checksum import ChecksumError
from mooncake_jax.transfer.segment import Part
from mooncake_jax.transfer.segment import verify

IDLE_S = 3600.0  # a connection may say nothing for so long
MAX_STRANGERS = 128  # connections that have not said the secret yet
TELL_EVERY_S = 0.1


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
    self._channels: dict[Channel, threading.Thread] = {}
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
    """Ends all connections; what they were taking has ended, too."""
    with self._lock:
      self._is_closed = True
      channels = {**self._channels}
    self._socket.shutdown(socket.SHUT_RDWR)
    self._socket.close()
    for channel in channels:
      channel.close()
    for thread in (self._thread, *channels.values()):
      thread.join(self._spec.stall_s)

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
        thread = threading.Thread(
          target=self._serve, args=(channel,), name='arrivals', daemon=True
        )
        self._welcome(channel, thread)
        thread.start()

  def _welcome(self, channel: Channel, thread: threading.Thread) -> None:
    """Under the lock. Where too many say nothing the oldest has to go."""
    if len(self._strangers) >= MAX_STRANGERS:
      oldest = next(iter(self._strangers))
      self._forget(oldest)
      oldest.close()
    self._channels[channel] = thread
    self._strangers[channel] = None

  def _forget(self, channel: Channel) -> None:
    self._channels.pop(channel, None)
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
        self._take(channel, inlet)
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

  def _take(self, channel: Channel, inlet: Inlet) -> None:
    """Takes the parts that a message offers, or says why not.

    Raises:
      ValueError: one is no part of this KVCache: that ends the connection.
    """
    message = channel.receive(IDLE_S)
    offers = [Offered.of(each) for each in message.get('parts') or ()]
    for offer in offers:
      self._shape.check(offer)
    note = dict(message.get('note') or {})
    taking = _Taking(
      self._spec.stall_s,
      self._shape.dtype,
      self._arrivals,
      note,
      channel,
      inlet,
    )
    for offer in offers:
      taking.take(offer)
    taking.fetch()
    taking.tell()


class _Taking:
  """Of one message: parts that are fetched together while there is room."""

  def __init__(
    self,
    stall_s: float,
    dtype: np.dtype,
    arrivals: Arrivals,
    note: Mapping[str, Any],
    channel: Channel,
    inlet: Inlet,
  ):
    self._stall_s = stall_s
    self._dtype = dtype
    self._arrivals = arrivals
    self._note = note
    self._channel = channel
    self._inlet = inlet
    self._waiting: list[Offered] = []  # for which room was taken
    self._first = 0  # of the arrays not yet fetched or skipped
    self._answers: list[dict[str, Any]] = []  # not yet told
    self._told_s = time.monotonic()

  def take(self, offer: Offered) -> None:
    """Takes room for a part, or skips one that nobody wants."""
    num_bytes, arrivals = offer.num_bytes(self._dtype), self._arrivals
    if offer.number != GREETING and not arrivals.wants(offer.number):
      self.fetch()
      sizes = offer.sizes(self._dtype)
      self._inlet.skip(self._note, self._first, sizes, self._channel)
      self._first += len(offer.shapes)
      self._answers.append(_refused('nobody waits for it any more'))
      return
    if not self._joins or not arrivals.room(num_bytes, 0.0):
      self.fetch()
      # Its sender waits no longer.
      if not arrivals.room(num_bytes, self._stall_s):
        raise ConnectionAbortedError('closed, or no room')
    self._waiting.append(offer)

  def tell(self) -> None:
    """Answers for what was fetched or skipped."""
    if self._answers:
      self._channel.send({'answers': self._answers})
    self._answers, self._told_s = [], time.monotonic()

  @property
  def _joins(self) -> bool:
    """Whether one more may wait without those before it having come."""
    return not self._waiting or self._inlet.joins

  def fetch(self) -> None:
    """Brings the parts that wait, and hands them over."""
    offers, self._waiting = self._waiting, []
    if not offers:
      return
    arrays = [offer.empty(self._dtype) for offer in offers]
    into = [array for each in arrays for array in each]
    left = [offer.num_bytes(self._dtype) for offer in offers]
    try:
      self._inlet.fetch(
        self._note, self._first, into, self._channel, self._stall_s
      )
      self._first += len(into)
      for offer, slices in zip(offers, arrays):
        self._answers.append(self._landed(offer, tuple(slices), left.pop(0)))
    except BaseException:
      for num_bytes in left:
        self._arrivals.give_back(num_bytes)
      raise
    if time.monotonic() - self._told_s > TELL_EVERY_S:
      self.tell()  # the sender sees that it goes on

  def _landed(
    self, offer: Offered, slices: tuple[np.ndarray, ...], num_bytes: int
  ) -> dict[str, str]:
    part = Part(*offer.layers, slices, offer.total)
    try:
      verify(part, f'arrival {offer.number}')
    except ChecksumError as error:
      self._arrivals.give_back(num_bytes)
      return _refused(str(error))
    if offer.number == GREETING:
      self._arrivals.give_back(num_bytes)
    else:
      self._arrivals.landed(offer.number, part._replace(total=None))
    return {'status': 'landed'}


def _refused(error: str) -> dict[str, str]:
  return {'status': 'refused', 'error': error}

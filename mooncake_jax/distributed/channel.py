# SPDX-License-Identifier: Apache-2.0
"""A socket that carries messages and bytes, with a deadline on every wait.

A message is a length and JSON: what comes from the network is data, never
code. Bytes follow the message that announces them.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import json
import select
import socket
import struct
from typing import Any

import numpy as np

LENGTH = struct.Struct('<I')
MAX_MESSAGE_BYTES = 1 << 20
Address = tuple[str, int]


class Channel:
  """One end of a connection; one thread at a time uses it."""

  def __init__(self, sock: socket.socket, stall_s: float):
    """Takes over a connected socket.

    Args:
      stall_s: a wait during which nothing moves fails after so long.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(stall_s)
    self._sock = sock

  @classmethod
  def to(cls, address: Address, stall_s: float) -> 'Channel':
    """Connects; OSError if nobody answers."""
    return cls(socket.create_connection(address, stall_s), stall_s)

  def send(
    self, message: dict[str, Any], payload: Iterable[memoryview] = ()
  ) -> None:
    """Sends a message and what it announces; OSError if it can't."""
    text = json.dumps(message).encode()
    self._sock.sendall(LENGTH.pack(len(text)) + text)
    for piece in payload:
      self._sock.sendall(piece)

  def receive(self, patience_s: float | None = None) -> dict[str, Any]:
    """The next message.

    Args:
      patience_s: how long to wait for its beginning; None is as for all.

    Raises:
      OSError: none came, or the other end is gone.
      ValueError: it is no message.
    """
    (length,) = LENGTH.unpack(self._first(LENGTH.size, patience_s))
    if length > MAX_MESSAGE_BYTES:
      raise ValueError(f'a message of {length} > {MAX_MESSAGE_BYTES} bytes')
    text = bytearray(length)
    self.fill([memoryview(text)])
    message = json.loads(text)
    if not isinstance(message, dict):
      raise ValueError('a message that is no JSON object')
    return message

  def has_news(self, patience_s: float) -> bool:
    """Waits for something to receive, or the end, at most so long."""
    readable, _, _ = select.select([self._sock], [], [], patience_s)
    return bool(readable)

  def fill(self, pieces: Sequence[memoryview]) -> None:
    """Receives bytes into memory; OSError if they don't come."""
    for piece in pieces:
      at = 0
      while at < len(piece):
        if not (count := self._sock.recv_into(piece[at:])):
          raise ConnectionResetError('the other end is gone')
        at += count

  def skip(self, num_bytes: int) -> None:
    """Receives bytes that nobody wants."""
    scratch = memoryview(bytearray(min(num_bytes, 1 << 20)))
    while num_bytes:
      piece = scratch[: min(num_bytes, len(scratch))]
      self.fill([piece])
      num_bytes -= len(piece)

  @property
  def is_gone(self) -> bool:
    """Whether the other end has closed; only while it has nothing to say."""
    try:
      return self.has_news(0.0) and not self._sock.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
      return True

  @property
  def is_closed(self) -> bool:
    """Whether it was closed here."""
    return self._sock.fileno() < 0

  def close(self) -> None:
    """Ends the connection; who waits at it learns so."""
    try:
      self._sock.shutdown(socket.SHUT_RDWR)
    except OSError:
      pass  # it was not connected any more
    self._sock.close()

  def _first(self, count: int, patience_s: float | None) -> bytes:
    head = bytearray(count)
    before_s = self._sock.gettimeout()
    if patience_s is not None:
      self._sock.settimeout(patience_s)
    try:
      self.fill([memoryview(head)])
    finally:
      self._sock.settimeout(before_s)
    return bytes(head)


def raw_views(arrays: Iterable[np.ndarray]) -> list[memoryview]:
  """The arrays' bytes; of contiguous ones without a copy."""
  return [
    memoryview(np.ascontiguousarray(a).reshape(-1).view(np.uint8))  # pyright: ignore
    for a in arrays
  ]

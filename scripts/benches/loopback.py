# SPDX-License-Identifier: Apache-2.0
"""Bytes to a process and back over one plain socket of loopback.

As a program it is the other process: it keeps one buffer, receives into it
and sends from it, and prints the port it listens on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
import socket
import struct
import subprocess
import sys

import numpy as np

from mooncake_jax.transfer.checksum import raw_bytes
from scripts.gin_source import ROOT

HEADER = struct.Struct('<cQ')


class Loopback:
  """The near end."""

  def __init__(self, connection: socket.socket):
    self._connection = connection

  def put(self, array: np.ndarray) -> None:
    """Sends bytes and waits until the other has them all."""
    self._connection.sendall(HEADER.pack(b'p', array.nbytes))
    self._connection.sendall(raw_bytes(array))
    assert self._connection.recv(1) == b'k'

  def get(self, array: np.ndarray) -> None:
    """Fills an array with bytes of the other."""
    self._connection.sendall(HEADER.pack(b'g', array.nbytes))
    receive(self._connection, raw_bytes(array))


@contextmanager
def loopback(max_bytes: int) -> Iterator[Loopback]:
  """Starts the other process, with a warm buffer of so many bytes."""
  command = [sys.executable, '-m', 'scripts.benches.loopback', str(max_bytes)]
  with subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout
    port = int(process.stdout.readline())
    with socket.create_connection(('127.0.0.1', port)) as connection:
      connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
      yield Loopback(connection)


def receive(connection: socket.socket, into: memoryview) -> bool:
  """Fills memory; False if the other closed before."""
  while len(into):
    count = connection.recv_into(into)
    if not count:
      return False
    into = into[count:]
  return True


def main(max_bytes: int) -> None:
  buffer = memoryview(bytearray(b'\1' * max_bytes))
  header = memoryview(bytearray(HEADER.size))
  with socket.create_server(('127.0.0.1', 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
  with connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while receive(connection, header):
      what, num_bytes = HEADER.unpack(header)
      if what == b'p':
        receive(connection, buffer[:num_bytes])
        connection.sendall(b'k')
      else:
        connection.sendall(buffer[:num_bytes])


if __name__ == '__main__':
  main(int(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""How simulated instances tell each other that something has arrived.

Numbers over `Channel`s, one thread for all that come in: what is sent would be
KVCache, and takes its time in the simulation.
"""

from collections.abc import Callable
from collections.abc import Sequence
import hmac
import selectors
import socket
import threading

from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.spec import WireSpec


class SimLanding:
  """Listens for the cluster's other instances."""

  def __init__(
    self,
    spec: WireSpec,
    secret: str,
    landed: Callable[[Sequence[int]], None],
  ):
    """Binds and starts to listen.

    Args:
      landed: called with the numbers of what has arrived.
    """
    self._spec = spec
    self._secret = secret
    self._landed = landed
    self._socket = socket.create_server((spec.bind, 0))
    self._selector = selectors.DefaultSelector()
    self._selector.register(self._socket, selectors.EVENT_READ)
    self._thread = threading.Thread(
      target=self._main, name='landing', daemon=True
    )
    self._is_closed = False
    self._thread.start()

  @property
  def address(self) -> Address:
    """Where it listens."""
    host, port = self._socket.getsockname()[:2]
    return host, port

  def close(self) -> None:
    """Ends all connections."""
    self._is_closed = True
    self._socket.shutdown(socket.SHUT_RDWR)
    self._thread.join()
    self._socket.close()
    self._selector.close()

  def _main(self) -> None:
    while not self._is_closed:
      for key, _ in self._selector.select(timeout=1.0):
        if key.data is None:
          self._accept()
        else:
          self._hear(key)

  def _accept(self) -> None:
    try:
      sock, _ = self._socket.accept()
    except OSError:
      return  # closed, or gone again
    channel = Channel(sock, self._spec.stall_s)
    self._selector.register(sock, selectors.EVENT_READ, channel)

  def _hear(self, key: selectors.SelectorKey) -> None:
    """One message: each says the secret, so that no state is kept."""
    try:
      message = key.data.receive()
      secret = str(message.get('secret', '')).encode()
      if not hmac.compare_digest(secret, self._secret.encode()):
        raise ValueError('the secret is another')
      self._landed([*map(int, message['numbers'])])
    except (OSError, ValueError, KeyError, TypeError):
      self._selector.unregister(key.fileobj)
      key.data.close()


class SimWires:
  """Ways to other instances, each opened when it is needed first."""

  def __init__(self, spec: WireSpec, secret: str):
    self._spec = spec
    self._secret = secret
    self._addresses: dict[str, Address] = {}
    self._channels: dict[str, Channel] = {}

  def lead(self, instance: str, address: Address | None) -> None:
    """Where an instance listens from now on; None: it is gone."""
    self.close(instance)
    self._addresses.pop(instance, None)
    if address is not None:
      self._addresses[instance] = address

  def tell(self, instance: str, numbers: Sequence[int]) -> None:
    """These have arrived there. OSError if nobody can be told."""
    if instance not in self._addresses:
      raise ConnectionRefusedError(f'{instance} is not there')
    if instance not in self._channels:
      address = self._addresses[instance]
      self._channels[instance] = Channel.to(address, self._spec.stall_s)
    message = {'secret': self._secret, 'numbers': [*numbers]}
    try:
      self._channels[instance].send(message)
    except OSError:
      self.close(instance)
      raise

  def close(self, instance: str) -> None:
    """Hangs up."""
    channel = self._channels.pop(instance, None)
    if channel is not None:
      channel.close()

  def close_all(self) -> None:
    """Hangs up all."""
    for instance in [*self._channels]:
      self.close(instance)

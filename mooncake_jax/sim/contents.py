# SPDX-License-Identifier: Apache-2.0
"""Which layers of which replicas are there: what a read finds."""

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence

from mooncake_jax.backend import BlockOps
from mooncake_jax.backend import Replica
from mooncake_jax.backend import Status
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.sim.remote_store import RemoteStore


class Contents:
  """The bytes of all segments, without the bytes."""

  def __init__(self, num_layers: int, store: RemoteStore):
    """Starts empty but for what the Mooncake Store has."""
    self._all_layers = (1 << num_layers) - 1
    self._store = store
    # A bit a layer.
    self._layers: dict[Replica, int] = defaultdict(int)

  def move(self, ops: Sequence[TransferOp]) -> tuple[Status, ...]:
    """Writes what has arrived; a status an op: reads of nothing fail."""
    if type(ops) is not BlockOps:
      return tuple([self._move(op) for op in ops])
    if ops.are_puts:
      self._layers.update(dict.fromkeys(ops.replicas, self._all_layers))
      return ('completed',) * len(ops)
    if set(map(self._layers.get, ops.replicas)) <= {self._all_layers}:
      return ('completed',) * len(ops)
    each: list[Status] = [
      'completed' if self._has(replica, self._all_layers) else 'failed'
      for replica in ops.replicas
    ]
    return tuple(each * len(ops.layout.layer_ranges))

  def drop(self, replicas: Iterable[Replica]) -> None:
    """Forgets them."""
    for replica in replicas:
      self._layers.pop(replica, None)

  def _move(self, op: TransferOp) -> Status:
    layers = (1 << op.stop_layer) - (1 << op.start_layer)
    if isinstance(op.src, Replica) and not self._has(op.src, layers):
      return 'failed'
    if isinstance(op.dst, Replica):
      if op.dst.segment == REMOTE:
        self._store.put(op.dst.key)
      else:
        self._layers[op.dst] |= layers
    return 'completed'

  def _has(self, replica: Replica, layers: int) -> bool:
    if replica.segment == REMOTE:
      return self._store.has(replica.key)
    return not layers & ~self._layers.get(replica, 0)

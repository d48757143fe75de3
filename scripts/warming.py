# SPDX-License-Identifier: Apache-2.0
"""A run that begins with the KVCache of an earlier one, and leaves its own."""

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
import sys
import threading
from typing import TYPE_CHECKING

from mooncake_jax.backend import Backend
from mooncake_jax.cluster import Cluster
from mooncake_jax.events import Event
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.transfer.snapshot_spec import PoolFormat
from mooncake_jax.transfer.snapshot_spec import SnapshotSpec
from scripts.experiment import Experiment
from scripts.resuming import Preempted

if TYPE_CHECKING:  # JAX is loaded where there are devices
  from mooncake_jax.engine.device import DeviceBackend

OnEvent = Callable[[Event], None]


@contextmanager
def warmed(
  experiment: Experiment,
  config: ModelConfig,
  cluster: Cluster,
  backend: Backend,
  on_event: OnEvent | None = None,
) -> Iterator[OnEvent | None]:
  """Loads the newest snapshot; leaves one at the end, or when SIGTERM comes.

  Yields:
    What `serve` is to tell of events, for snapshots meanwhile.

  Raises:
    ValueError: the snapshot is of another model, dtype or layout.
  """
  spec = experiment.snapshot
  if spec is None or not cluster.spec.reuse:
    yield on_event
    return
  from mooncake_jax.engine.device import DeviceBackend

  assert isinstance(backend, DeviceBackend)
  snapshots = Snapshots(
    spec, pool_format(experiment, config), cluster, backend, on_event
  )
  if spec.loads:
    print(f'{snapshots.load()} blocks from {spec.path}', file=sys.stderr)
  try:
    yield snapshots.on_event if spec.saves else on_event
  except Preempted:
    snapshots.end()
    raise
  snapshots.end()


def pool_format(experiment: Experiment, config: ModelConfig) -> PoolFormat:
  """What the bytes of this experiment's blocks mean."""
  cluster = experiment.cluster
  return PoolFormat(
    experiment.model.identity(cluster.kv_dtype),
    cluster.kv_dtype,
    config.num_layers,
    config.num_kv_heads,
    config.head_dim,
    cluster.block_size_tokens,
  )


class Snapshots:
  """A cluster's snapshots: taken in the loop's thread, written beside it."""

  def __init__(
    self,
    spec: SnapshotSpec,
    written: PoolFormat,
    cluster: Cluster,
    backend: 'DeviceBackend',
    tell: OnEvent | None,
  ):
    self._spec = spec
    self._format = written
    self._cluster = cluster
    self._backend = backend
    self._tell = tell
    self._last_s = backend.now_s()
    self._writing: threading.Thread | None = None
    self._error: Exception | None = None

  def load(self) -> int:
    """Brings in the newest one; returns how many blocks that were."""
    from mooncake_jax.engine.warm_start import restore
    from mooncake_jax.transfer.snapshot import load

    pools = load(self._spec.path, self._format)
    return restore(self._cluster, self._backend, pools)

  def on_event(self, event: Event) -> None:
    """Begins one if it is time to and none is being written."""
    if self._tell is not None:
      self._tell(event)
    every_s, now_s = self._spec.every_s, self._backend.now_s()
    if every_s is None or now_s - self._last_s < every_s:
      return
    if self._writing is None or not self._writing.is_alive():
      self._last_s = now_s
      self._begin()

  def end(self) -> None:
    """Leaves the last one.

    Raises:
      OSError, ValueError: one could not be written.
    """
    if self._spec.saves:
      self._wait()
      self._begin()
      self._wait()

  def _begin(self) -> None:
    from mooncake_jax.engine.warm_start import captured
    from mooncake_jax.transfer.snapshot import save

    pools = captured(self._cluster, self._backend)

    def write() -> None:
      try:
        save(self._spec.path, pools, self._format)
      except Exception as error:
        self._error = error

    self._writing = threading.Thread(target=write, name='snapshot')
    self._writing.start()

  def _wait(self) -> None:
    if self._writing is not None:
      self._writing.join()
    if self._error is not None:
      raise self._error

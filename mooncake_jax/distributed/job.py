# SPDX-License-Identifier: Apache-2.0
"""Which process of a `jax.distributed` job this is."""

from dataclasses import dataclass
import socket


@dataclass(frozen=True)
class JaxJob:
  """One of its processes, the first of which leads.

  Attributes:
    coordinator: HOST:PORT of the first process. What is None JAX finds out.
    binds: whether that one listens at this very address, not at all.
  """

  coordinator: str | None
  num_processes: int | None
  process_id: int | None
  binds: bool = False

  def join(self) -> bool:
    """Makes this process one of the job; whether it is the first."""
    import jax  # where there are devices

    # It would take SIGTERM away from whoever listens to it here.
    jax.config.update('jax_enable_preemption_service', False)
    jax.distributed.initialize(
      self.coordinator,
      self.num_processes,
      self.process_id,
      coordinator_bind_address=self.coordinator if self.binds else None,
    )
    return jax.process_index() == 0

  @property
  def address(self) -> str:
    """Where the others reach this one, the first."""
    if self.coordinator is not None:
      return self.coordinator.rpartition(':')[0]
    return socket.gethostbyname(socket.gethostname())

# SPDX-License-Identifier: Apache-2.0
"""How each process of a cluster joins one store, as a value that goes there."""

from dataclasses import dataclass
from dataclasses import replace

from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.mooncake_store import MooncakeSegment


@dataclass(frozen=True)
class MooncakeSource:
  """A Mooncake Store for instances in processes of their own.

  Attributes:
    capacity_bytes: of what the cluster knows to be there.
  """

  config: MooncakeConfig
  capacity_bytes: int

  def open(self, block: BlockFormat, host: str) -> MooncakeSegment:
    """Joins; a store that is not there is waited for and has nothing.

    Args:
      host: this process's address, unless the config has another.

    Raises:
      ImportError: see `MooncakeClient`.
    """
    config = replace(self.config, host=self.config.host or host)
    return MooncakeSegment(
      REMOTE, config, block, self.capacity_bytes, waits=True
    )

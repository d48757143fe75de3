# SPDX-License-Identifier: Apache-2.0
"""The movers there are, by name."""

from mooncake_jax.distributed.mover import Mover
from mooncake_jax.distributed.nixl import NixlMover
from mooncake_jax.distributed.spec import MoverName
from mooncake_jax.distributed.tcp import TcpMover


def make_mover(name: MoverName, agent: str, devices: str = '') -> Mover:
  """The mover of a name, for a process that others know as `agent`.

  Args:
    devices: of NIXL's network devices only these ('lo', 'mlx5_0:1').

  Raises:
    ImportError: what it needs is not installed.
  """
  return TcpMover() if name == 'tcp' else NixlMover(agent, devices)

# SPDX-License-Identifier: Apache-2.0
"""The movers there are, by name."""

from mooncake_jax.distributed.jax_pull import JaxMover
from mooncake_jax.distributed.mover import Mover
from mooncake_jax.distributed.nixl import NixlMover
from mooncake_jax.distributed.spec import MoverName
from mooncake_jax.distributed.tcp import TcpMover


def make_mover(
  name: MoverName, agent: str, devices: str = '', bind: str = '127.0.0.1'
) -> Mover:
  """The mover of a name, for a process that others know as `agent`.

  Args:
    bind: the address of this host that JAX's transfer server listens at.
    devices: of NIXL's network devices only these ('lo', 'mlx5_0:1').

  Raises:
    ImportError: what it needs is not installed.
  """
  match name:
    case 'tcp':
      return TcpMover()
    case 'jax':
      return JaxMover(bind)
    case 'nixl':
      return NixlMover(agent, devices)

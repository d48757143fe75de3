# SPDX-License-Identifier: Apache-2.0
"""How fast the ways between a cluster's instances are."""

import itertools

from mooncake_jax.costs.links import LinkSpeed
from mooncake_jax.distributed.crew import Crew

MAX_WAYS = 16


def measure_ways(crew: Crew) -> list[LinkSpeed]:
  """Measures some ways between instances; while none of them is used.

  One after another, for they may share a line. Those that can't be measured
  lack.
  """
  ways = [*itertools.permutations(crew.addresses, 2)]
  speeds = []
  for here, there in ways[:: max(1, -(-len(ways) // MAX_WAYS))]:
    speeds += crew.ask('measure_link', there, names=[here]).values()
  return speeds

# SPDX-License-Identifier: Apache-2.0
"""Actors of an instance that spans processes: its leader has followers.

The leader starts them in its placement group, so they end with it, as Ray ends
what a dead actor had started. If one of them ends, the leader does: an instance
dies whole, and its driver starts it anew as any other.
"""

from collections.abc import Sequence
import logging
import os
import socket
import threading
from typing import Any
from typing import cast

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mooncake_jax.distributed.job import JaxJob
from mooncake_jax.distributed.spec import Spanning


class FollowerActor:
  """A process that follows the instance's first."""

  def follow(self, spec: Spanning) -> None:
    """To its end; raises OSError if the first is gone."""
    spec.follow()


def lead(spec: Spanning, bind: str) -> Spanning:
  """Has the other processes started; ends this one as soon as one ends.

  Args:
    bind: where this one listens, for them too.
  """
  with socket.create_server((bind, 0)) as server:
    coordinator = f'{bind}:{server.getsockname()[1]}'
  jobs = [
    JaxJob(coordinator, spec.num_processes, index, binds=True)
    for index in range(spec.num_processes)
  ]
  group: Any = ray.util.get_current_placement_group()
  actors = [_follower(group, job) for job in jobs[1:]]
  asked = [a.follow.remote(spec.part(job)) for a, job in zip(actors, jobs[1:])]
  watch = threading.Thread(
    target=_watch, args=(spec.name, asked, actors), name='watch', daemon=True
  )
  watch.start()
  return spec.part(jobs[0])


def _follower(group: PlacementGroup, job: JaxJob) -> Any:
  """A process in its place of the group, with what that has."""
  assert job.process_id is not None
  has = {**group.bundle_specs[job.process_id]}
  return (
    cast(Any, ray.remote)(FollowerActor)
    .options(
      num_cpus=has.pop('CPU', 0.0),
      num_gpus=has.pop('GPU', 0.0),
      resources=has,
      scheduling_strategy=PlacementGroupSchedulingStrategy(
        group, job.process_id
      ),
    )
    .remote()
  )


def _watch(name: str, asked: Sequence[Any], actors: Sequence[Any]) -> None:
  """Ends this process when a follower ends; holds them until then."""
  ended, _ = ray.wait([*asked], num_returns=1)
  try:
    why = ray.get(ended[0])
  except RayError as error:
    why = error
  index = asked.index(ended[0]) + 1
  logging.getLogger(__name__).error(
    'process %d of the %d of %s ended: %s', index, len(actors) + 1, name, why
  )
  os._exit(1)

# SPDX-License-Identifier: Apache-2.0
"""Instances' processes on a Ray cluster: started, or taken over."""

from collections.abc import Collection
from collections.abc import Sequence
import itertools
import logging
import math
import os
import time
from typing import Any
from typing import NamedTuple
import warnings

import ray
from ray.exceptions import RayError
from ray.exceptions import RayTaskError
from ray.util import list_named_actors
from ray.util.placement_group import placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mooncake_jax.distributed.actor import remote_actor
from mooncake_jax.distributed.actor import TAKE_S
from mooncake_jax.distributed.spec import num_processes
from mooncake_jax.distributed.spec import ProcessSpec
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.distributed.token import check_token

CALL_S = 30.0
# A local cluster keeps no objects but commands and reports.
OBJECT_STORE_BYTES = 128 << 20


class Launched(NamedTuple):
  """An actor, and the places of all processes of an instance that spans some.

  Its other processes end with the first, which is the actor.
  """

  actor: Any
  group: PlacementGroup | None

  def end(self) -> None:
    """Ends it; does not wait."""
    ray.kill(self.actor)
    if self.group is not None:
      remove_placement_group(self.group)


class Launcher:
  """Makes processes one driver's. Any thread may call.

  Attributes:
    processes: their instances; a process is named as its first.
    driver: what this one is called.
  """

  def __init__(
    self,
    workers: Sequence[ProcessSpec],
    spec: RaySpec,
    absent: Collection[str] = (),
  ):
    self._workers = {worker.name: worker for worker in workers}
    self._spec = spec
    there = [name for name in self._workers if name not in absent]
    alone = [(name,) for name in self._workers if name in absent]
    shared = split(there, spec.instances_per_process)
    self.processes = {names[0]: names for names in (*shared, *alone)}
    self._numbers = itertools.count()
    self.driver = f'driver-{os.getpid()}-{time.time_ns()}'

  @property
  def num_places(self) -> int:
    """Processes in all, with those that follow another."""
    return sum(
      num_processes(self._workers[process]) for process in self.processes
    )

  def launch(self, process: str) -> Launched:
    """An actor that loads and compiles."""
    spec, title = self._spec, f'{process}-{next(self._numbers)}-{self.driver}'
    more = {**spec.resources.get(process, {})}
    options: dict[str, Any] = {
      'num_cpus': spec.num_cpus,
      'num_gpus': spec.num_gpus,
      'resources': more,
    }
    group = self._group(process, more)
    if group is not None:
      first = PlacementGroupSchedulingStrategy(group, 0)
      options['scheduling_strategy'] = first
    if spec.name:
      options |= {
        'name': f'{process}/{title}',
        'namespace': spec.name,
        'lifetime': 'detached',
      }
    made_of = self._made_of(process)
    actor = remote_actor().options(**options)
    return Launched(actor.remote(made_of, title, self.driver), group)

  def _group(
    self, process: str, more: dict[str, float]
  ) -> PlacementGroup | None:
    """Places for the processes that an instance spans, if it spans several.

    One a node, where there are several nodes.
    """
    (first, *_), spec = self._made_of(process), self._spec
    if (count := num_processes(first)) == 1:
      return None
    nodes = sum(node['Alive'] for node in ray.nodes())
    place = {'CPU': spec.num_cpus, 'GPU': spec.num_gpus, **more}
    return placement_group(
      [{what: number for what, number in place.items() if number}] * count,
      'STRICT_SPREAD' if nodes > 1 else 'PACK',
      lifetime='detached' if spec.name else None,
    )

  def take_over(self, wanted: Collection[str]) -> dict[str, Launched]:
    """Processes that an earlier driver of this name left, by name.

    One that does not answer, or is not wanted, is ended.

    Raises:
      RuntimeError: one was made of other things.
    """
    found: dict[str, Launched] = {}
    named: Any = list_named_actors(all_namespaces=True)
    for each in named if self._spec.name else ():
      if each['namespace'] != self._spec.name:
        continue
      actor = ray.get_actor(each['name'], each['namespace'])
      name = each['name'].partition('/')[0]
      if name in wanted and name not in found and self._takes(name, actor):
        group: Any = ray.get(actor.group.remote(), timeout=CALL_S)
        found[name] = Launched(actor, group)
      else:
        ray.kill(actor)
    return found

  def _made_of(self, process: str) -> list[ProcessSpec]:
    return [self._workers[name] for name in self.processes[process]]

  def _takes(self, name: str, actor: Any) -> bool:
    """Whether a process goes on as this driver's."""
    asked = actor.take_over.remote(self.driver, self._made_of(name))
    try:
      secret: Any = ray.get(asked, timeout=2 * TAKE_S)
    except RayTaskError as error:
      if isinstance(error.cause, ValueError):
        raise RuntimeError(
          f'instance {name!r} of RaySpec.name={self._spec.name!r}: '
          f'{error.cause}; end it, or take another name'
        ) from error
      return False
    except RayError:
      return False
    # Those that are started from now on must know it too.
    self._workers = {
      other: worker.with_secret(secret)
      for other, worker in self._workers.items()
    }
    return True


def split(names: Sequence[str], size: int) -> list[tuple[str, ...]]:
  """Parts of at most `size`, each with names of all along the list.

  p0 p1 d0 d1 by 2 gives (p0, d0), (p1, d1): each has some of either role.
  """
  count = -(-len(names) // size)
  return [tuple(names[i::count]) for i in range(count)]


def join_ray(spec: RaySpec, num_places: int) -> bool:
  """Joins the cluster, or starts a local one; whether it did that.

  A local one asks for a token, which nobody else knows.
  """
  if ray.is_initialized():
    return False
  if spec.address is not None:
    ray.init(spec.address, logging_level=logging.ERROR)
    return True
  check_token()
  os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
  # Ray would have its workers yield to all else on the machine (nice 15).
  os.environ.setdefault('RAY_worker_niceness', '0')
  with warnings.catch_warnings():
    # It forks to run its own programs at once, which threads don't mind.
    warnings.simplefilter('ignore', RuntimeWarning)
    _start_ray(spec, num_places)
  return True


def _start_ray(spec: RaySpec, num_places: int) -> None:
  """Where a busy machine has Ray's processes start too slowly, once more."""
  for tries_left in (2, 1, 0):
    try:
      # Without 'local' it would join another that it finds here.
      ray.init(
        'local',
        num_cpus=max(1, math.ceil(num_places * spec.num_cpus)),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
      )
      return
    except Exception as error:  # Ray has no narrower one for it
      if not tries_left or 'timed out during startup' not in str(error):
        raise
      ray.shutdown()

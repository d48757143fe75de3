# SPDX-License-Identifier: Apache-2.0
"""Lanes: which ports the ops of a transfer pass, by where their ends lie."""

from collections.abc import Mapping
from collections.abc import Sequence
from functools import lru_cache

from mooncake_jax.backend import BlockOps
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.costs.model import Link

Layers = tuple[int, int]
# A link, the instance whose it is, and the one at its other end.
Lane = tuple[Link, str, str]
# Ops in a row of the same layers, and their bytes.
Group = tuple[Layers, int]


def lanes_of(
  ops: Sequence[TransferOp], homes: Mapping[str, str]
) -> dict[Lane, list[Group]]:
  """Groups of ops by the lane that they take, in the order given.

  Args:
    homes: decode instances that share their devices and host with a prefill
      instance, and that: pages do not move between the two.
  """
  lanes: dict[Lane, list[Group]] = {}
  if type(ops) is BlockOps:
    for segment, count in ops.segments.items():
      lane = _block_lane(segment, ops.pages.instance, ops.are_puts, homes)
      groups = [(layers, count * size) for layers, size in ops.parts]
      lanes[lane] = lanes.get(lane, []) + groups
    return lanes
  for op in ops:
    if not homes or not _stays(op, homes):
      layers = op.start_layer, op.stop_layer
      _add(lanes.setdefault(_lane(op, homes), []), layers, op.num_bytes)
  return lanes


def arrived(
  ops: Sequence[TransferOp],
  homes: Mapping[str, str],
  moved_bytes: Mapping[Lane, float],
) -> list[bool]:
  """Which ops are there once so many bytes passed each lane."""
  left_bytes = dict(moved_bytes)
  there: list[bool] = []
  for op in ops:
    if _stays(op, homes):
      there.append(True)
      continue
    lane = _lane(op, homes)
    left_bytes[lane] = left_bytes.get(lane, 0.0) - op.num_bytes
    there.append(left_bytes[lane] > -0.5)  # bytes that flowed are no integer
  return there


def _stays(op: TransferOp, homes: Mapping[str, str]) -> bool:
  """Whether it goes from an instance to the one on the same devices."""
  src, dst = op.src, op.dst
  return (
    isinstance(src, DevicePages)
    and isinstance(dst, DevicePages)
    and homes.get(dst.instance) == src.instance
  )


def ports_of(lane: Lane) -> tuple[tuple[str, str, Link], ...]:
  """Ports that a lane passes: what, whose, and by which link's costs."""
  link, name, other = lane
  match link:
    case 'copy' | 'handoff':
      return ('out', name, link), ('in', other, link)
    case 'remote_read':
      return (('in', name, link),)
    case 'remote_write':
      return (('out', name, link),)
    case 'ssd_read' if name != other:
      return (link, name, link), ('out', name, 'copy'), ('in', other, 'copy')
    case 'ssd_write' if name != other:
      return (link, name, link), ('in', name, 'copy'), ('out', other, 'copy')
  return ((link, name, link),)


def _add(
  groups: list[tuple[Layers, int]], layers: Layers, num_bytes: int
) -> None:
  """Puts an op at the end."""
  if groups and groups[-1][0] == layers:
    groups[-1] = layers, groups[-1][1] + num_bytes
  else:
    groups.append((layers, num_bytes))


def _lane(op: TransferOp, homes: Mapping[str, str]) -> Lane:
  """The link an op crosses and the instances whose ports it passes."""
  src, dst = op.src, op.dst
  if isinstance(dst, Replica) and isinstance(src, DevicePages):
    return _block_lane(dst.segment, src.instance, True, homes)
  return _lane_between(
    src.segment if isinstance(src, Replica) else src.instance,
    isinstance(src, DevicePages),
    dst.segment if isinstance(dst, Replica) else dst.instance,
    isinstance(dst, DevicePages),
  )


def _block_lane(
  segment: str, instance: str, is_put: bool, homes: Mapping[str, str]
) -> Lane:
  if is_put:
    here = homes.get(instance, instance)
    return _lane_between(here, True, segment, False)
  return _lane_between(segment, False, instance, True)


@lru_cache(maxsize=1 << 16)
def _lane_between(src: str, from_pages: bool, dst: str, to_pages: bool) -> Lane:
  source = 'device' if from_pages else medium(src)
  target = 'device' if to_pages else medium(dst)
  here, there = owner(src), owner(dst)
  match source, target:
    case 'device', 'device':
      return 'handoff', here, there
    case _, 'ssd':
      return 'ssd_write', there, here
    case 'ssd', _:
      return 'ssd_read', here, there
    case _, 'remote':
      return 'remote_write', here, there
    case 'remote', _:
      return 'remote_read', there, here
    case _ if here != there:
      return 'copy', here, there
    case 'device', _:
      return 'offload', here, there
  return 'onload', here, there

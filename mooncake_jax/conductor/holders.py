# SPDX-License-Identifier: Apache-2.0
"""Who has a block: bit masks of instances, one object per distinct set.

The blocks of a chain mostly have the same holders. So equal sets are one
object, a block costs no more than a pointer to it, and a walk along a chain
looks at masks only where the object changes.
"""

import weakref

from mooncake_jax.blocks.segments import Medium

# Where a medium stands in a set. A remote store is an instance of its own,
# and its memory is as near to it as a host's.
SLOT: dict[Medium, int] = {'device': 0, 'host': 1, 'ssd': 2, 'remote': 1}
EXPECTED = 3
Masks = tuple[int, int, int, int]


class Holders:
  """Masks of the instances that have a block, by how.

  Attributes:
    masks: device, host, SSD, and those where it is expected.
    expected: the last of these.
    sources: who can give it to others: not from a device.
    near: who has it in host memory, or will.
    held: who has it anywhere but on a device only, or will.
    anyhow: who has it on whatever medium, or will.
    is_plain: nobody has it on a device or an SSD.
  """

  __slots__ = (
    '__weakref__',
    'anyhow',
    'device',
    'expected',
    'held',
    'is_plain',
    'masks',
    'near',
    'sources',
  )

  def __init__(self, masks: Masks):
    device, host, ssd, expected = masks
    self.masks = masks
    self.device = device
    self.expected = expected
    self.sources = host | ssd
    self.near = host | expected
    self.held = host | ssd | expected
    self.anyhow = self.held | device
    self.is_plain = not device | ssd

  @property
  def stored(self) -> int:
    """Who has it now, on whatever medium."""
    return self.device | self.sources


NOBODY = Holders((0, 0, 0, 0))


class HolderSets:
  """Makes holders, equal ones only once; unused ones vanish."""

  def __init__(self):
    self._sets: weakref.WeakValueDictionary[Masks, Holders] = (
      weakref.WeakValueDictionary({NOBODY.masks: NOBODY})
    )

  def __len__(self) -> int:
    return len(self._sets)

  def having(self, holders: Holders, slot: int, bit: int) -> Holders:
    """The same with the instances of `bit` in `slot`."""
    masks = holders.masks
    if masks[slot] & bit == bit:
      return holders
    return self._get(_replaced(masks, slot, masks[slot] | bit))

  def lacking(self, holders: Holders, slot: int, bit: int) -> Holders:
    """The same without the instances of `bit` in `slot`."""
    masks = holders.masks
    if not masks[slot] & bit:
      return holders
    return self._get(_replaced(masks, slot, masks[slot] & ~bit))

  def _get(self, masks: Masks) -> Holders:
    holders = self._sets.get(masks)
    if holders is None:
      holders = self._sets[masks] = Holders(masks)
    return holders


def _replaced(masks: Masks, slot: int, mask: int) -> Masks:
  changed = list(masks)
  changed[slot] = mask
  return changed[0], changed[1], changed[2], changed[3]

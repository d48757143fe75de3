# SPDX-License-Identifier: Apache-2.0
"""What the Mooncake Store says in numbers, as our own exceptions.

Each message is one line with the code, so that a log of either system finds
the other's. A lost or missing block is no failure of a request: whoever reads
one of these recomputes.
"""

from mooncake_jax.transfer.checksum import ChecksumError

MISSING = -704
FULL = -200
NO_ANSWER = frozenset((-900, -901))  # of the master


class MooncakeError(RuntimeError):
  """The store did not do what was asked."""


class BlockMissing(MooncakeError, LookupError):
  """No complete copy of the block is there: a miss."""


class LeaseHeld(MooncakeError):
  """A reader's lease keeps the block from being removed."""


class LeaseLost(MooncakeError):
  """The lease ended before the bytes were read, so they may be another's."""


class StoreFull(MooncakeError):
  """No memory was found or freed in time."""


class StoreUnreachable(MooncakeError, ConnectionError):
  """The master, or the process that lends the memory, does not answer."""


class StoreTimeout(MooncakeError, TimeoutError):
  """The deadline passed; what was begun may still end, unseen."""


class BlockCorrupt(MooncakeError, ChecksumError):
  """The bytes that came are not those that were put."""


# Codes of Mooncake's include/types.h; those left out are MooncakeError.
ERRORS: dict[int, tuple[type[MooncakeError], str]] = {
  -101: (StoreUnreachable, 'the memory that held it is gone'),
  FULL: (StoreFull, 'no memory is free'),
  -500: (StoreUnreachable, 'a write failed'),
  -600: (MooncakeError, 'invalid arguments, or a buffer of another size'),
  -702: (BlockMissing, 'its copy is invalid'),
  -703: (BlockMissing, 'its copy is not complete'),
  MISSING: (BlockMissing, 'there is no such block'),
  -706: (LeaseHeld, 'a reader holds a lease'),
  -707: (LeaseLost, 'the lease ended before the read did'),
  -710: (BlockMissing, 'it has no copy'),
  -712: (BlockMissing, 'its copy is gone'),
  -800: (StoreUnreachable, 'a transfer failed'),
  -801: (BlockCorrupt, 'its checksum does not match'),
  -900: (StoreUnreachable, 'the master cannot be reached'),
  -901: (StoreTimeout, 'the master did not answer in time'),
}


def error_of(code: int, what: str) -> MooncakeError:
  """The exception for a code < 0 of an action on a block."""
  kind, why = ERRORS.get(code, (MooncakeError, 'failed'))
  return kind(f'{what}: {why} (Mooncake error {code})')

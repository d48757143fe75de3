# SPDX-License-Identifier: Apache-2.0
"""Host memory that stays with the process when it is freed.

A store that is full frees a block for each one it takes. glibc gives freed
blocks of more than 32 MiB back to the kernel, and smaller ones often enough;
the next block then pays for a page fault every 4 KiB, which runs at about
1 GB/s where a warm copy runs at ten times that.
"""

import ctypes

# mallopt's parameters (malloc.h).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
LARGEST_BYTES = 1 << 30


def keep_freed_memory() -> bool:
  """Makes malloc keep freed blocks of up to 1 GiB; False without glibc.

  Concerns the whole process, so a program calls it and no library does; at
  its start, for threads that are there keep their arenas. One arena: memory
  that one thread freed serves the others.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError):
    return False
  settings = (
    (M_MMAP_THRESHOLD, LARGEST_BYTES),
    (M_TRIM_THRESHOLD, (1 << 31) - 1),
    (M_ARENA_MAX, 1),
  )
  return all(mallopt(name, value) == 1 for name, value in settings)

# SPDX-License-Identifier: Apache-2.0
"""Compiled programs are kept on disk, for the next process and next device.

On a GPU JAX loads what was compiled for one device onto another; on a CPU it
looks for programs of the very same devices, so that four instances compile all
of theirs four times, though the machine code is one.
"""

from pathlib import Path
from typing import Any

import jax
from jax._src import cache_key

# Not of JAX's interface: where it is not there, devices compile their own.
_hash_options: Any = getattr(
  cache_key, '_hash_serialized_compile_options', None
)


def keep_programs(folder: Path) -> None:
  """Keeps all programs, quickly compiled ones too.

  Args:
    folder: where, unless JAX was told (JAX_COMPILATION_CACHE_DIR): a checkout
      may be read-only, or one for all nodes.
  """
  if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore
    jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  if _hash_options is not None:
    cache_key._hash_serialized_compile_options = _of_any_device


def _of_any_device(hasher: Any, options: Any, **_: bool) -> None:
  _hash_options(hasher, options, strip_device_assignment=True)

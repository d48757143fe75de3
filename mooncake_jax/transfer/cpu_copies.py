# SPDX-License-Identifier: Apache-2.0
"""Pages out of and into a pool that lies in a CPU's memory, by memcpy.

A compiled copy reads what it is about to overwrite into the cache first;
memcpy does not, and moves half as much again. Only for a pool whose programs
have all ended: the caller, its owner, sees to that, and that nobody else reads
the pages meanwhile. These wait for nothing and return when the copy is done.

L layer, P page, b blocks of n pages, C token in a page, K KV head, H head dim.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import ctypes
from typing import Any

import jax
import numpy as np

from mooncake_jax.transfer.entries import aligned
from mooncake_jax.transfer.heads import HeadSlices

# Turned off, a CPU's blocks go the way of an accelerator's, by compiled copies
# and `device_put`: that way is tested where there is no accelerator.
IS_TAKEN = True


def is_taken(devices: Iterable[Any]) -> bool:
  """Whether memory of these devices is copied by the CPU itself."""
  return IS_TAKEN and all(device.platform == 'cpu' for device in devices)


def on_cpu(array: jax.Array) -> bool:
  return all(device.platform == 'cpu' for device in array.devices())


def copy_out(
  kv_LP2CKH: jax.Array, pages_bn: np.ndarray, start_layer: int, stop_layer: int
) -> list[HeadSlices]:
  """Returns b blocks of pages as slices [L, 2, n * C, K, H] of their heads."""
  pools: dict[int, np.ndarray] = {}
  for shard in kv_LP2CKH.addressable_shards:
    first_head = shard.index[4].start or 0
    if first_head not in pools:
      pools[first_head] = _view(shard.data)[start_layer:stop_layer]
  in_order, dtype = [pools[head] for head in sorted(pools)], kv_LP2CKH.dtype
  return [
    tuple(_gather(pool, pages, dtype) for pool in in_order)
    for pages in pages_bn.tolist()
  ]


def copy_in(
  kv_LP2CKH: jax.Array,
  blocks: Iterable[tuple[np.ndarray, int, Mapping[Any, np.ndarray]]],
) -> None:
  """Writes blocks [L, 2, S, K, H], each into pages, from a layer on.

  A block is given by device, each its own heads.
  """
  pools = [(s.device, _view(s.data)) for s in kv_LP2CKH.addressable_shards]
  for pages, start_layer, by_device in blocks:
    for device, pool_LP2CKH in pools:
      block = by_device[device]
      block = block.view(f'u{block.dtype.itemsize}')
      L, two, _, K, H = block.shape
      pool = pool_LP2CKH[start_layer : start_layer + L]
      block_L2nCKH = block.reshape(L, two, len(pages), -1, K, H)
      for i, page in enumerate(pages.tolist()):
        np.copyto(pool[:, page], block_L2nCKH[:, :, i])


def _gather(
  pool_LP2CKH: np.ndarray, pages: list[int], dtype: np.dtype
) -> np.ndarray:
  L, _, two, C, K, H = pool_LP2CKH.shape
  n = len(pages)
  num_bytes = L * two * n * C * K * H * pool_LP2CKH.itemsize
  block = aligned(num_bytes).view(pool_LP2CKH.dtype)
  block_L2nCKH = block.reshape(L, two, n, C, K, H)
  for i, page in enumerate(pages):
    np.copyto(block_L2nCKH[:, :, i], pool_LP2CKH[:, page])
  return block.view(dtype).reshape(L, two, n * C, K, H)


def _view(array: jax.Array) -> np.ndarray:
  """A CPU array's memory, as integers of its item size; keeps nothing alive.

  A NumPy array made by JAX would count as a user of the pool and keep it from
  being donated.
  """
  memory = (ctypes.c_uint8 * array.nbytes).from_address(
    array.unsafe_buffer_pointer()
  )
  flat = np.ctypeslib.as_array(memory).view(f'u{array.dtype.itemsize}')
  return flat.reshape(array.shape)

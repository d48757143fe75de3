# SPDX-License-Identifier: Apache-2.0
"""Decode steps with the parameters bound once.

A call costs the host microseconds an array, as what XLA notes of each has left
the processor's cache since the last step (LOG.md). So a compiled program takes
the parameters in a flat list, small ones of one shape as one, and a batch as
two arrays: one that each step gives back, one that stays.

B batch row, X columns of 32 bits.
"""

from collections import defaultdict
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.model.decode import decode_step
from mooncake_jax.model.decode import DecodeState
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.params import Params
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model_config import ModelConfig

Place = tuple[int, int | None]  # of a leaf: which array, where in it
# The first columns of a batch: who is active, and `SamplingRows`; then pages.
_DTYPES = ('bool', 'float32', 'int32', 'float32', 'float32', 'int32', 'bool')


class Batch(NamedTuple):
  """A `DecodeState` in two arrays of int32; floats and bools as their bits.

  Attributes:
    moving_2B: tokens and positions.
    fixed_BX: all the rest, column by column.
  """

  moving_2B: jax.Array | np.ndarray
  fixed_BX: jax.Array | np.ndarray

  @classmethod
  def of(cls, state: DecodeState) -> 'Batch':
    """Packs host arrays."""
    columns = [state.active_B, *jax.tree.leaves(state.sampling)]
    assert [str(column_B.dtype) for column_B in columns] == [*_DTYPES]
    fixed_BX = np.column_stack([*map(_bits, columns), state.page_table_BP])
    return cls(np.stack([state.tokens_B, state.positions_B]), fixed_BX)


class BoundStep:
  """`decode_step` of one model, a compiled program a batch size."""

  def __init__(
    self, params: Params, config: ModelConfig, kernel: AttentionKernel
  ):
    leaves, self._treedef = jax.tree.flatten(params)
    self._arrays, places = _pack(leaves)
    self._places = tuple(places)
    self._config = config
    self._kernel: AttentionKernel = kernel
    self._programs: dict[int, Any] = {}

  @property
  def num_programs(self) -> int:
    """Batch sizes that were compiled for."""
    return len(self._programs)

  @property
  def num_arrays(self) -> int:
    """Arrays of parameters that a call takes."""
    return len(self._arrays)

  def __call__(
    self, kv: jax.Array, batch: Batch
  ) -> tuple[Batch, jax.Array, jax.Array]:
    """See `decode_step`; `kv` is donated."""
    size = batch.moving_2B.shape[1]
    if size not in self._programs:
      self._programs[size] = self._compile(kv, batch)
    moving_2B, report_BR, kv = self._programs[size](kv, *batch, *self._arrays)
    return Batch(moving_2B, batch.fixed_BX), report_BR, kv

  def _compile(self, kv: jax.Array, batch: Batch) -> Any:
    step = _step_of(self._treedef, self._places, self._config, self._kernel)
    return step.lower(kv, *batch, *self._arrays).compile()


@functools.cache
def _step_of(
  treedef: Any,
  places: tuple[Place, ...],
  config: ModelConfig,
  kernel: AttentionKernel,
) -> Any:
  """The step of all models of one kind, so that JAX knows its programs again.

  Like those of other module-level functions they are compiled once for a shape
  and place, also where a process makes one backend after another.
  """

  def step(kv, moving_2B, fixed_BX, *arrays):
    leaves = [arrays[i] if at is None else arrays[i][at] for i, at in places]
    params = jax.tree.unflatten(treedef, leaves)
    state, report_BR, kv = decode_step(
      params, config, kv, _unpacked(moving_2B, fixed_BX), kernel
    )
    moving_2B = jnp.stack([state.tokens_B, state.positions_B])
    return moving_2B, report_BR, kv

  return jax.jit(step, donate_argnums=0)


def _unpacked(moving_2B: jax.Array, fixed_BX: jax.Array) -> DecodeState:
  columns = [_of_bits(fixed_BX[:, i], dtype) for i, dtype in enumerate(_DTYPES)]
  active_B, *sampling = columns
  table_BP = fixed_BX[:, len(columns) :]
  rows = SamplingRows(*sampling)
  return DecodeState(moving_2B[0], moving_2B[1], active_B, table_BP, rows)


def _bits(column_B: jax.Array | np.ndarray) -> np.ndarray:
  """A bool becomes 0 or 1, a number stays the bits it is."""
  is_bool = column_B.dtype == np.bool_
  return np.asarray(column_B, np.int32 if is_bool else None).view(np.int32)


def _of_bits(column_B: jax.Array, dtype: str) -> jax.Array:
  if dtype == 'bool':
    return column_B != 0
  return jax.lax.bitcast_convert_type(column_B, dtype)


def _pack(leaves: list[jax.Array]) -> tuple[list[jax.Array], list[Place]]:
  """Stacks vectors of one kind; the other arrays stay as they are."""
  kinds = defaultdict(list)
  for i, leaf in enumerate(leaves):
    is_vector = leaf.ndim == 1
    kinds[(leaf.shape, leaf.dtype) if is_vector else i].append(i)
  arrays: list[jax.Array] = []
  places: list[Place] = [(0, None)] * len(leaves)
  for number, members in enumerate(kinds.values()):
    of_kind = [leaves[i] for i in members]
    is_alone = len(of_kind) == 1
    arrays.append(of_kind[0] if is_alone else jnp.stack(of_kind))
    for at, i in enumerate(members):
      places[i] = number, None if is_alone else at
  return arrays, places

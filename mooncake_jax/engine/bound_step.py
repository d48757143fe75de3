# SPDX-License-Identifier: Apache-2.0
"""Decode steps with the parameters bound once.

A call costs the host about a microsecond an array, as what XLA notes of each
has left the processor's cache since the last step (LOG.md). So a compiled
program takes the arrays in a flat list, small ones of one shape as one, and
returns only what changes.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import jax
from jax import numpy as jnp

from mooncake_jax.model.decode import decode_step
from mooncake_jax.model.decode import DecodeState
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.params import Params
from mooncake_jax.model_config import ModelConfig

Place = tuple[int, int | None]  # of a leaf: which array, where in it


class BoundStep:
  """`decode_step` of one model, a compiled program a batch size."""

  def __init__(
    self, params: Params, config: ModelConfig, kernel: AttentionKernel
  ):
    leaves, self._treedef = jax.tree.flatten(params)
    self._arrays, self._places = _pack(leaves)
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
    self, kv: jax.Array, state: DecodeState
  ) -> tuple[DecodeState, jax.Array, jax.Array]:
    """See `decode_step`; `kv` is donated."""
    size = len(state.tokens_B)
    if size not in self._programs:
      self._programs[size] = self._compile(kv, state)
    tokens_B, positions_B, report_BR, kv = self._programs[size](
      kv, state, *self._arrays
    )
    state = replace(state, tokens_B=tokens_B, positions_B=positions_B)
    return state, report_BR, kv

  def _compile(self, kv: jax.Array, state: DecodeState) -> Any:
    def step(kv, state, *arrays):
      leaves = [
        arrays[i] if at is None else arrays[i][at] for i, at in self._places
      ]
      params = jax.tree.unflatten(self._treedef, leaves)
      state, report_BR, kv = decode_step(
        params, self._config, kv, state, self._kernel
      )
      return state.tokens_B, state.positions_B, report_BR, kv

    jitted = jax.jit(step, donate_argnums=0)
    return jitted.lower(kv, state, *self._arrays).compile()


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

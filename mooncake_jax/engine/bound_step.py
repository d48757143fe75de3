# SPDX-License-Identifier: Apache-2.0
"""Decode steps with the parameters bound once.

A call of a jitted function looks at every array of its arguments: some 270 of
an unrolled model take longer than the host may take for a step. A compiled
program that has them in a flat list looks at half as much (LOG.md).
"""

from typing import Any

import jax

from mooncake_jax.model.decode import decode_step
from mooncake_jax.model.decode import DecodeState
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.params import Params
from mooncake_jax.model_config import ModelConfig


class BoundStep:
  """`decode_step` of one model, a compiled program a batch size."""

  def __init__(
    self, params: Params, config: ModelConfig, kernel: AttentionKernel
  ):
    self._leaves, self._treedef = jax.tree.flatten(params)
    self._config = config
    self._kernel: AttentionKernel = kernel
    self._programs: dict[int, Any] = {}

  @property
  def num_programs(self) -> int:
    """Batch sizes that were compiled for."""
    return len(self._programs)

  def __call__(
    self, kv: jax.Array, state: DecodeState
  ) -> tuple[DecodeState, jax.Array, jax.Array]:
    """See `decode_step`; `kv` is donated."""
    size = len(state.tokens_B)
    if size not in self._programs:
      self._programs[size] = self._compile(kv, state)
    return self._programs[size](kv, state, *self._leaves)

  def _compile(self, kv: jax.Array, state: DecodeState) -> Any:
    def step(kv, state, *leaves):
      params = jax.tree.unflatten(self._treedef, leaves)
      return decode_step(params, self._config, kv, state, self._kernel)

    jitted = jax.jit(step, donate_argnums=0)
    return jitted.lower(kv, state, *self._leaves).compile()

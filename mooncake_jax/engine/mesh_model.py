# SPDX-License-Identifier: Apache-2.0
"""A stage's parameters, and the programs that use them on its pool.

See `stage_pool.py` about threads and host arrays.

B batch row, P page of a page table.
"""

from collections.abc import Callable
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from mooncake_jax.backend import DecodeRow
from mooncake_jax.engine.bound_step import Batch
from mooncake_jax.engine.bound_step import BoundStep
from mooncake_jax.engine.progress import Layers
from mooncake_jax.engine.spec import bucket
from mooncake_jax.engine.stage_pool import ChunkInputs
from mooncake_jax.engine.stage_pool import StagePool
from mooncake_jax.model.decode import DecodeState
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.params import join_params
from mooncake_jax.model.params import Params
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Sampling


class MeshModel:
  """Dispatches prefill chunks and decode steps.

  Attributes:
    groups: consecutive layer ranges, which a chunk goes through one by one.
    steps: the programs of decode steps.
  """

  def __init__(
    self,
    config: ModelConfig,
    pool: StagePool,
    params: Sequence[Params],
    groups: Sequence[Layers],
    prefill_program: Callable[..., Any],
    kernel: AttentionKernel = 'jnp',
  ):
    """Takes parameters that lie on the mesh, a tree for each layer group.

    `kernel` is of decode steps; the prefill program has its own.
    """
    self.config = config
    self.pool = pool
    self.groups = tuple(groups)
    self._prefill = prefill_program
    self._group_params = params
    whole = join_params(params)
    self.steps = BoundStep(whole, config, kernel)
    firsts = [start - pool.layers[0] for start, _ in groups]
    self._first_layers = [pool.put(np.int32(first)) for first in firsts]

  def prefill(
    self, inputs: ChunkInputs, group: int, x: jax.Array | None = None
  ) -> jax.Array:
    """Computes a chunk in one of the layer groups.

    Args:
      x: what the group before gave; None takes the tokens.

    Returns:
      What the next group takes; after the last layer, the token drawn.
    """
    return self.pool.in_turn(
      partial(self._compute, inputs, group, x), 'prefill', (group,)
    )

  def _compute(
    self, inputs: ChunkInputs, group: int, x: jax.Array | None
  ) -> jax.Array:
    out, _, self.pool.kv = self._prefill(
      self._group_params[group],
      self.config,
      self.pool.kv,
      inputs.tokens_T if x is None else x,
      *inputs[1:],
      self._first_layers[group],
    )
    return out

  def batch(self, rows: Sequence[DecodeRow]) -> Batch:
    """Puts a batch on the devices, padded with inactive rows."""
    B = bucket(len(rows), self.pool.spec.batch_sizes, 'rows')
    tokens_B = np.zeros(B, np.int32)
    positions_B = np.zeros(B, np.int32)
    page_table_BP = np.zeros((B, self.pool.table_pages), np.int32)
    for i, row in enumerate(rows):
      if row.token is None or row.remaining < 1:
        raise ValueError(
          f'row {row.request_id!r}: {row.token=} '
          f'{row.remaining=}, needs a token and a place'
        )
      tokens_B[i] = row.token
      positions_B[i] = row.position
      stop = row.position + row.remaining
      page_table_BP[i] = self.pool.page_table(row.pages, stop, row.request_id)
    padding = [Sampling()] * (B - len(rows))
    sampling = SamplingRows.of([*(row.sampling for row in rows), *padding])
    active_B = np.arange(B) < len(rows)
    state = DecodeState(
      tokens_B, positions_B, active_B, page_table_BP, sampling
    )
    return self.pool.put(Batch.of(state))

  def step(self, batch: Batch) -> tuple[Batch, jax.Array]:
    """Steps a batch by one token; returns the report on it [B, R] too."""
    batch, report_BR = self.pool.in_turn(partial(self._step, batch), 'step')
    if not self.pool.can_copy_now:  # a CPU's arrays are read where they are
      report_BR.copy_to_host_async()
    return batch, report_BR

  def _step(self, batch: Batch) -> tuple[Batch, jax.Array]:
    batch, report_BR, self.pool.kv = self.steps(self.pool.kv, batch)
    return batch, report_BR

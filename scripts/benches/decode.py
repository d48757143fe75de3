# SPDX-License-Identifier: Apache-2.0
"""Decode steps against the machine's memory bandwidth."""

from mooncake_jax.blocks.accounting import kv_bytes
from scripts.benches import limits
from scripts.benches.model import Model
from scripts.benches.rows import best_s
from scripts.benches.rows import Row

BATCHES = ((1, 512), (8, 512), (8, 2048))  # (rows, context tokens each)


def decode(quick: bool) -> list[Row]:
  """Time, throughput and share of bandwidth of a step."""
  repeats = 5 if quick else 20
  peak = limits.read_bytes_per_s(repeats)
  rows = [Row('decode.read_bytes_per_s', peak, 'B/s', 'float32 x @ W')]
  cases = BATCHES[:2] if quick else BATCHES
  model = Model(max_tokens=64 + max(c for _, c in cases), max_batch=8)
  for batch, context in cases:
    rows += _step(model, batch, context, peak, repeats)
  return rows


def _step(
  model: Model, batch: int, context: int, peak: float, repeats: int
) -> list[Row]:
  state = model.batch([context] * batch)
  seconds = best_s(lambda: model.decode(state).tokens_B, repeats)
  num_bytes = model.step_bytes + kv_bytes(model.config, batch * context, 4)
  name = f'decode.{batch}x{context}'
  return [
    Row(f'{name}.step_s', seconds, 's'),
    Row(f'{name}.tokens_per_s', batch / seconds, 'tokens/s'),
    Row(
      f'{name}.bandwidth_share',
      num_bytes / seconds / peak,
      'ratio',
      'decode.read_bytes_per_s of this run',
      target=0.5 if batch == 1 else None,
    ),
  ]

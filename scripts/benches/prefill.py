# SPDX-License-Identifier: Apache-2.0
"""Prefill chunks against the machine's peak of matrix products."""

from scripts.benches import limits
from scripts.benches.model import Model
from scripts.benches.rows import best_s
from scripts.benches.rows import Row

CHUNKS = ((256, 0), (256, 1024), (256, 4096))  # (chunk, prefix) tokens


def prefill(quick: bool) -> list[Row]:
  """Time, throughput and share of peak of a chunk on a growing prefix."""
  repeats = 3 if quick else 10
  peak = limits.gemm_flops_per_s(repeats)
  rows = [Row('prefill.gemm_flops_per_s', peak, 'FLOP/s', 'float32 product')]
  cases = CHUNKS[:2] if quick else CHUNKS
  model = Model(max_tokens=max(map(sum, cases)), max_batch=1)
  for chunk, prefix in cases:
    rows += _chunk(model, chunk, prefix, peak, repeats)
  return rows


def _chunk(
  model: Model, chunk: int, prefix: int, peak: float, repeats: int
) -> list[Row]:
  seconds = best_s(lambda: model.prefill(chunk, prefix), repeats)
  flops = model.config.prefill_flops(prefix, prefix + chunk)
  name = f'prefill.{chunk}_on_{prefix}'
  return [
    Row(f'{name}.chunk_s', seconds, 's'),
    Row(f'{name}.tokens_per_s', chunk / seconds, 'tokens/s'),
    Row(
      f'{name}.gemm_share',
      flops / seconds / peak,
      'ratio',
      'prefill.gemm_flops_per_s of this run',
      target=0.5,
    ),
  ]

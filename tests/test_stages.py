# SPDX-License-Identifier: Apache-2.0
"""Pipelines of stages compute what one stage does, whatever the split.

Prefill of a whole prompt in one chunk, on one device, is the reference.
"""

from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from engine_pieces import Desk
from engine_pieces import LAYOUT
from engine_pieces import MODEL
from engine_pieces import tiny_spec
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.programs import PrefillPrograms
from mooncake_jax.model.params import init_params
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.model.tick import leave
from mooncake_jax.request import Sampling

LAYERS = 8
DEEP = replace(MODEL, num_layers=LAYERS)
# Ranges of 3 layers: [0, 3), [3, 6), [6, 8) cross the stages' boundaries.
DEEP_LAYOUT = replace(LAYOUT, num_layers=LAYERS, layers_per_transfer=3)
LONGEST = 96
WHOLE = 'whole'
PIPE = 'pipe'
# Layers of each stage, tensor parallelism, layers in a group.
SPLITS = (
  ((8,), 2, 3),
  ((5, 3), 1, None),
  ((3, 1, 4), 2, 2),
  ((2, 2, 2, 2), 2, None),
  ((1, 2, 1, 2, 2), 1, 1),
  ((1,) * 8, 1, None),
)


@functools.cache
def deep_params():
  return init_params(DEEP, jax.random.key(1))


@dataclass
class Pipeline:
  """A pipeline and an instance without; keeps the logits of each chunk."""

  desk: Desk
  logits: list[jax.Array] = field(default_factory=list)

  def prefill(
    self, name: str, tokens, pages, cuts: list[int], start: int = 0
  ) -> tuple[int | None, np.ndarray]:
    """Starts all chunks at once; returns the first token and its logits."""
    backend, work = self.desk.backend, -1
    for stop in cuts:
      last = Sampling() if stop == len(tokens) else None
      chunk = PrefillChunk('r', 0, start, stop, pages, tokens[start:stop], last)
      work = backend.prefill(name, chunk)
      start = stop
    end = self.desk.end_of(work)
    assert end.status == 'completed', end.error
    stages = backend.instances[name].stages
    assert len(end.spans) == len(stages)
    assert all(a <= b for a, b in end.spans)
    return end.token, np.asarray(self.logits[-1])

  def kv(self, name: str, pages: tuple[int, ...]) -> np.ndarray:
    """KVCache of some pages [L, 2, S, K, H], through the host segment."""
    replica = Replica(WHOLE, 7)
    end = self.desk.transfer(*ops_between(DevicePages(name, pages), replica))
    assert end.status == 'completed', end.error
    segment = self.desk.backend.instances[WHOLE].segment
    parts = segment.read(7, 0, LAYERS)
    whole = [np.concatenate([*map(np.asarray, p.slices)], 3) for p in parts]
    self.desk.backend.drop((replica,))
    return np.concatenate(whole, 0)

  def move(self, source: DevicePages, target: DevicePages) -> None:
    end = self.desk.transfer(*ops_between(source, target))
    assert end.status == 'completed', end.error


def ops_between(source, target) -> list[TransferOp]:
  size = len(source.pages) if isinstance(source, DevicePages) else 0
  return [
    TransferOp(source, target, *r, DEEP_LAYOUT.part_bytes(size, r))
    for r in DEEP_LAYOUT.layer_ranges
  ]


@functools.cache
def pipeline(split: int, executor: str) -> Pipeline:
  """Kept until the end: what it compiled serves all examples."""
  stage_layers, tensor, group = SPLITS[split]
  logits: list[jax.Array] = []

  def kept(program):
    def run(*args):
      out = program(*args)
      if out[1] is not None:
        logits.append(out[1])
      return out

    return run

  programs = PrefillPrograms(kept(prefill_chunk), leave=kept(leave))

  whole = tiny_spec(WHOLE, chunk_buckets=(LONGEST,), devices=(0,))
  pipe = tiny_spec(
    PIPE,
    role='prefill',
    chunk_buckets=(8, 32),
    devices=tuple(range(len(stage_layers) * tensor)),
    stage_layers=stage_layers,
    layers_per_group=group,
    executor=executor,
  )
  backend = DeviceBackend(
    DEEP, DEEP_LAYOUT, [whole, pipe], deep_params(), prefill_programs=programs
  )
  return Pipeline(Desk(backend), logits)


def cuts_of(rng: np.random.Generator, start: int, stop: int) -> list[int]:
  """Ends of chunks of 1 to 32 tokens."""
  cuts = []
  while start < stop:
    start = min(start + int(rng.integers(1, 33)), stop)
    cuts.append(start)
  return cuts


@pytest.mark.parametrize('executor', ['mpmd', 'spmd'])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
  split=st.integers(0, len(SPLITS) - 1),
  num_tokens=st.integers(1, LONGEST),
  prefix=st.integers(0, 8),
  seed=st.integers(0, 1000),
)
def test_a_pipeline_computes_what_one_stage_does(
  executor, split, num_tokens, prefix, seed
):
  pipe, rng = pipeline(split, executor), np.random.default_rng(seed)
  tokens = rng.integers(0, DEEP.vocab_size, num_tokens).astype(np.int32)
  size = DEEP_LAYOUT.pages_for(num_tokens)
  pages = tuple(int(p) + 1 for p in rng.permutation(60)[:size])
  expected = pipe.prefill(WHOLE, tokens, pages, [num_tokens])
  # The prefix comes from the other instance: whole blocks, never the last one.
  blocks = min(prefix, DEEP_LAYOUT.reusable_blocks(num_tokens))
  reused = blocks * DEEP_LAYOUT.block_size_tokens
  if reused:
    have = pages[: reused // 4]
    pipe.move(DevicePages(WHOLE, have), DevicePages(PIPE, have))
  cuts = cuts_of(rng, reused, num_tokens)
  got = pipe.prefill(PIPE, tokens, pages, cuts, reused)
  assert got[0] == expected[0]
  np.testing.assert_allclose(got[1], expected[1], rtol=0, atol=1e-4)
  kv = [pipe.kv(name, pages)[:, :, :num_tokens] for name in (PIPE, WHOLE)]
  np.testing.assert_allclose(kv[0], kv[1], rtol=0, atol=1e-5)

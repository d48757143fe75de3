# SPDX-License-Identifier: Apache-2.0
"""A tiny model on a few simulated devices, and how tests talk to it."""

from collections.abc import Sequence
from functools import cache

import jax
import numpy as np

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DecodeRow
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.model.params import init_params
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Sampling

MODEL = ModelConfig(
  'llama',
  vocab_size=64,
  model_dim=32,
  mlp_dim=48,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  max_tokens=128,
)
# Pages of 4 tokens, blocks of 2 pages, layers [0, 2) and [2, 3).
LAYOUT = KVLayout(
  num_layers=3,
  token_layer_bytes=2 * 2 * 8 * 4,
  page_tokens=4,
  block_size_tokens=8,
  layers_per_transfer=2,
)
NUM_PAGES = 128
CHUNK = 16


@cache
def tiny_params():
  return init_params(MODEL, jax.random.key(0))


def tiny_spec(name: str, **kwargs) -> InstanceSpec:
  fields = {
    'role': 'both',
    'num_pages': NUM_PAGES,
    'max_tokens': MODEL.max_tokens,
    'chunk_buckets': (CHUNK,),
    'max_batch': 4,
    'batch_buckets': (4,),
    'host_bytes': 1 << 20,
    'unroll': False,
  }
  return InstanceSpec(name, **{**fields, **kwargs})


def tiny_backend(*specs: InstanceSpec, **kwargs) -> DeviceBackend:
  return DeviceBackend(MODEL, LAYOUT, specs, tiny_params(), **kwargs)


def random_tokens(count: int, seed: int) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(0, MODEL.vocab_size, count).astype(np.int32)


class Desk:
  """The loop thread's side: starts works and keeps what came of them."""

  def __init__(self, backend: DeviceBackend):
    self.backend = backend
    self.completions: dict[WorkId, list[Completion]] = {}

  def poll(self, until_s: float | None = None) -> list[Completion]:
    arrived = self.backend.wait(until_s)
    for completion in arrived:
      self.completions.setdefault(completion.work_id, []).append(completion)
    return arrived

  def end_of(self, work_id: WorkId, limit_s: float = 60.0) -> Completion:
    """Waits for the work's last completion."""
    limit_s += self.backend.now_s()
    while not (got := self.completions.get(work_id)) or not got[-1].done:
      self.poll(limit_s)
      assert self.backend.now_s() < limit_s, f'work {work_id} hangs'
    return got[-1]

  def prefill(
    self,
    instance: str,
    tokens: np.ndarray,
    pages: Sequence[int],
    start: int = 0,
    chunk: int = CHUNK,
  ) -> int:
    """Computes a prompt from `start` on; returns the first token."""
    token = None
    for at in range(start, len(tokens), chunk):
      stop = min(at + chunk, len(tokens))
      last = Sampling() if stop == len(tokens) else None
      work = PrefillChunk('r', 0, at, stop, tuple(pages), tokens[at:stop], last)
      end = self.end_of(self.backend.prefill(instance, work))
      assert end.status == 'completed', end.error
      token = end.token
    assert token is not None
    return token

  def tokens_of(self, work_id: WorkId, request_id: str = 'r') -> list[int]:
    """What a row of a decode work has emitted."""
    return [
      token
      for completion in self.completions.get(work_id, ())
      for emitted in completion.steps
      for row in emitted.rows
      if row.request_id == request_id
      for token in row.tokens
    ]

  def decode(
    self,
    instance: str,
    token: int,
    position: int,
    pages: Sequence[int],
    count: int,
  ) -> list[int]:
    """Decodes one row alone; returns its tokens."""
    row = decode_row('r', token, position, pages, count)
    work = self.backend.decode(instance, DecodeBatch((row,)), count)
    end = self.end_of(work)
    assert end.status == 'completed', end.error
    return self.tokens_of(work)

  def transfer(
    self, *ops: TransferOp, priority: int = 0, timeout_s: float = 60.0
  ) -> Completion:
    deadline_s = self.backend.now_s() + timeout_s
    return self.end_of(self.backend.transfer(ops, priority, deadline_s))

  def move(
    self, src: DevicePages | Replica, dst: DevicePages | Replica
  ) -> None:
    """Moves all layers, range by range."""
    end = self.transfer(*ops_of(src, dst))
    assert end.status == 'completed', end.error

  def bytes_of(self, replica: Replica) -> np.ndarray:
    """A replica's canonical bytes [L, 2, S, K, H]."""
    segment = self.backend.instances[replica.segment].segment
    parts = segment.read(replica.replica_id, 0, MODEL.num_layers)
    whole = [np.concatenate([*map(np.asarray, p.slices)], 3) for p in parts]
    return np.concatenate(whole, 0)


def ops_of(
  src: DevicePages | Replica, dst: DevicePages | Replica
) -> tuple[TransferOp, ...]:
  pages = next(
    s.pages
    for s in (src, dst, DevicePages('', (0, 0)))
    if isinstance(s, DevicePages)
  )
  return tuple(
    TransferOp(src, dst, *layers, LAYOUT.part_bytes(len(pages), layers))
    for layers in LAYOUT.layer_ranges
  )


def decode_row(
  name: str,
  token: int,
  position: int,
  pages: Sequence[int],
  remaining: int,
  **kwargs,
) -> DecodeRow:
  return DecodeRow(name, 0, token, position, tuple(pages), remaining, **kwargs)


def plain_tokens(desk: Desk, tokens: np.ndarray, count: int) -> list[int]:
  """First token and `count` more, by one instance in pages 100 and up."""
  pages = range(100, NUM_PAGES)
  first = desk.prefill('a', tokens, pages)
  return [first, *desk.decode('a', first, len(tokens), pages, count)]

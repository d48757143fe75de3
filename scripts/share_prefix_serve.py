# SPDX-License-Identifier: Apache-2.0
"""Serves one prompt through a Mooncake Store: get, prefill, put, decode.

`share_prefix.py` runs it twice. It works on the backend as the deciders do,
and says one line of JSON.
"""

import argparse
import json
import sys
from typing import Any

import numpy as np

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DecodeRow
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.model.params import materialize_unembed
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Sampling
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.mooncake_errors import MooncakeError
from mooncake_jax.transfer.mooncake_store import MooncakeSegment
from scripts.device import start_jax
from scripts.models import Model
from scripts.share_prefix import STAND_IN

NAME, STORE = 'both0', 'mooncake'
PAGE_TOKENS, BLOCK_TOKENS, CHUNK_TOKENS = 64, 128, 256
LAYERS_PER_TRANSFER = 10
ANSWER_TOKENS = 16
DEADLINE_S = 30.0


class Server:
  """One instance, and the store as its only cache."""

  def __init__(self, backend: DeviceBackend, store: MooncakeSegment):
    self.backend = backend
    self.store = store
    self.layout = backend.layout

  def end_of(self, work_id: WorkId) -> list[Completion]:
    """All completions of the one work under way."""
    found = [*self.backend.wait(None)]
    while not (found and found[-1].done):
      found += self.backend.wait(None)
    assert found[-1].work_id == work_id
    return found

  def hit(self, keys: tuple[BlockKey, ...]) -> int:
    """Blocks of the prefix that the store has; 0 if it doesn't say."""
    try:
      there = self.store.exists(keys)
    except MooncakeError as error:
      print(f'no hit: {error}', file=sys.stderr)
      return 0
    return [*there, False].index(False)

  def move(self, keys: tuple[BlockKey, ...], first: int, to_store: bool) -> int:
    """Moves blocks between pages and store; returns how many came whole."""
    ranges = self.layout.layer_ranges
    ops = []
    for i, key in enumerate(keys, first):
      pages = self.layout.block_pages(self.pages(1 << 30), i)
      here, there = DevicePages(NAME, pages), Replica(STORE, i, key)
      src, dst = (here, there) if to_store else (there, here)
      for layers in ranges:
        num_bytes = self.layout.part_bytes(len(pages), layers)
        op = TransferOp(src, dst, *layers, num_bytes)
        ops.append(op)
    work = self.backend.transfer(
      tuple(ops), 0, self.backend.now_s() + DEADLINE_S
    )
    status = self.end_of(work)[-1].op_status
    n = len(ranges)
    whole = [
      set(status[n * i : n * i + n]) <= {'completed'} for i in range(len(keys))
    ]
    return [*whole, False].index(False)

  def pages(self, num_tokens: int) -> tuple[int, ...]:
    count = self.backend.instances[NAME].spec.num_pages - 1
    return tuple(range(1, 1 + min(self.layout.pages_for(num_tokens), count)))

  def prefill(self, tokens: np.ndarray, start: int) -> int:
    """Computes [start, end) of a prompt; returns the first token."""
    token = None
    for at in range(start, len(tokens), CHUNK_TOKENS):
      stop = min(at + CHUNK_TOKENS, len(tokens))
      last = Sampling() if stop == len(tokens) else None
      work = PrefillChunk(
        'r', 0, at, stop, self.pages(stop), tokens[at:stop], last
      )
      end = self.end_of(self.backend.prefill(NAME, work))[-1]
      if end.status != 'completed':
        raise RuntimeError(end.error)
      token = end.token
    assert token is not None
    return token

  def decode(self, token: int, position: int) -> list[int]:
    pages = self.pages(position + ANSWER_TOKENS)
    row = DecodeRow('r', 0, token, position, pages, ANSWER_TOKENS)
    work = self.backend.decode(NAME, DecodeBatch((row,)), ANSWER_TOKENS)
    ends = self.end_of(work)
    return [t for end in ends for row in end.rows for t in row.tokens]

  def serve(self, tokens: np.ndarray, keys: tuple[BlockKey, ...]) -> dict:
    """Serves the prompt; `get_s` is how much of `ttft_s` the store took."""
    keys = keys[: self.layout.reusable_blocks(len(tokens))]
    start_s = self.backend.now_s()
    hit = self.hit(keys)
    hit = self.move(keys[:hit], 0, to_store=False) if hit else 0
    get_s = self.backend.now_s() - start_s
    token = self.prefill(tokens, hit * BLOCK_TOKENS)
    ttft_s = self.backend.now_s() - start_s
    put = self.move(keys[hit:], hit, to_store=True) if keys[hit:] else 0
    return {
      'ttft_s': ttft_s,
      'get_s': get_s,
      'hit_tokens': hit * BLOCK_TOKENS,
      'prompt_tokens': len(tokens),
      'put_blocks': put,
      'answer': [token, *self.decode(token, len(tokens))],
    }


def layout_of(config: ModelConfig) -> KVLayout:
  return KVLayout(
    config.num_layers,
    2 * config.num_kv_heads * config.head_dim * 4,
    PAGE_TOKENS,
    BLOCK_TOKENS,
    LAYERS_PER_TRANSFER,
  )


def run(model: Model, num_tokens: int, store: MooncakeConfig) -> dict[str, Any]:
  """Loads the model, joins the store and serves one prompt."""
  start_jax(1)
  config = model.read_config()
  block = BlockFormat(
    config.num_layers,
    BLOCK_TOKENS,
    config.num_kv_heads,
    config.head_dim,
    np.dtype('float32'),
  )
  rng = np.random.default_rng(0)
  tokens = rng.integers(3, config.vocab_size, num_tokens).astype(np.int32)
  keys = prefix_keys(tokens, BLOCK_TOKENS, model.identity())
  layout = layout_of(config)
  spec = InstanceSpec(
    NAME,
    'both',
    num_pages=1 + layout.pages_for(num_tokens + ANSWER_TOKENS),
    max_tokens=num_tokens + ANSWER_TOKENS,
    chunk_buckets=(PAGE_TOKENS, CHUNK_TOKENS),
    max_batch=1,
  )
  params = materialize_unembed(model.load_params())
  segment = MooncakeSegment(STORE, store, block, 1 << 40)
  with DeviceBackend(
    config, layout, [spec], params, stores=[segment]
  ) as backend:
    warmup(backend)
    return Server(backend, segment).serve(tokens, keys)


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  for name in ('model', 'master'):
    parser.add_argument(f'--{name}', required=True)
  parser.add_argument('--daemon', help='share its memory instead of TCP')
  parser.add_argument('--tokens', type=int, required=True)
  args = parser.parse_args(argv)
  store = MooncakeConfig(args.master, daemon=args.daemon)
  print(json.dumps(run(Model(args.model, STAND_IN), args.tokens, store)))
  return 0


if __name__ == '__main__':
  sys.exit(main())

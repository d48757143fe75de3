# SPDX-License-Identifier: Apache-2.0
"""What would lie where: contents of pages and replicas, beside a simulation.

A page's content is the text up to the last token in it, as its KVCache depends
on all of that; the text is a prompt and an output made up for it. Each layer
has its own. Bytes of a dropped replica are overwritten by other bytes but can
still be read, as on devices: whoever reads them has to notice that they are no
longer there.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DecodeRow
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.segments import medium
from mooncake_jax.instance.outputs import chain_keys
from mooncake_jax.request import Request

WRONG = b'wrong'


class Shadow:
  """Contents by (instance, page, layer) and by (replica, page, layer)."""

  def __init__(self, num_layers: int, page_tokens: int):
    self._layers = range(num_layers)
    self._page_tokens = page_tokens
    self._pages: dict[tuple[str, int, int], bytes] = {}
    self._replicas: dict[tuple[Replica, int], tuple[bytes, ...]] = {}
    self._works: dict[WorkId, tuple[str, PrefillChunk]] = {}
    self._ops: dict[WorkId, Sequence[TransferOp]] = {}
    self._batches: dict[WorkId, tuple[str, DecodeBatch]] = {}
    self.texts: dict[str, bytes] = {}
    # What a store that others fill holds under a key.
    self.blocks: dict[bytes, tuple[bytes, ...]] = {}
    self.wrong_tokens: set[tuple[str, int]] = set()

  def know(self, request: Request, block_size_tokens: int) -> None:
    """Learns a request's prompt, its output and what their blocks are."""
    assert request.prompt is not None
    count = request.max_output_tokens
    text = np.concatenate([request.prompt, output_of(request)]).tobytes()
    self.texts[request.request_id] = text
    pages = block_size_tokens // self._page_tokens
    total = request.num_prompt_tokens + count
    for i, key in enumerate(chain_keys(request, (), total, block_size_tokens)):
      self.blocks[key] = tuple(
        text[: 4 * (page + 1) * self._page_tokens]
        for page in range(i * pages, (i + 1) * pages)
      )

  def chunk(self, work_id: WorkId, instance: str, work: PrefillChunk) -> None:
    self._works[work_id] = instance, work

  def decode(self, work_id: WorkId, instance: str, batch: DecodeBatch) -> None:
    self._batches[work_id] = instance, batch

  def transfer(self, work_id: WorkId, ops: Sequence[TransferOp]) -> None:
    self._ops[work_id] = ops

  def drop(self, replicas: tuple[Replica, ...]) -> None:
    for replica in replicas:
      for layer in self._layers:
        if (replica, layer) in self._replicas:
          self._replicas[replica, layer] = ()

  def ended(self, completion: Completion) -> None:
    """Moves what the work moved; what failed may have left anything."""
    if chunk := self._works.pop(completion.work_id, None):
      self._compute(*chunk, completion.status == 'completed')
    if completion.work_id in self._batches:
      self._step(completion)
    ops = self._ops.pop(completion.work_id, ())
    for op, status in zip(ops, completion.op_status):
      if status != 'cancelled':
        self._move(op, status == 'completed')

  def holds(self, request: Request, instance: str, pages, num_tokens) -> bool:
    """Whether pages hold the KVCache of the prompt's first tokens."""
    return all(
      self._pages.get((instance, page, layer), b'').startswith(
        self.texts[request.request_id][: 4 * n]
      )
      for layer in self._layers
      for i, page in enumerate(pages)
      if (n := self._filled(i, num_tokens)) > i * self._page_tokens
    )

  def is_right(self, replica: Replica) -> bool:
    """Whether a replica holds the block that its key names."""
    return all(
      self._replicas.get((replica, layer)) == self.blocks[replica.key]
      for layer in self._layers
    )

  def _filled(self, page: int, num_tokens: int) -> int:
    return min((page + 1) * self._page_tokens, num_tokens)

  def _compute(self, instance: str, work: PrefillChunk, completed: bool):
    right = completed and self._fill(instance, work, work.start, work.stop)
    if work.sampling is not None and completed:
      key = work.request_id, work.attempt
      (self.wrong_tokens.discard if right else self.wrong_tokens.add)(key)
    if not completed:
      self._fill(instance, work, work.start, work.stop, WRONG)

  def _step(self, made: Completion) -> None:
    """Each row wrote the KVCache of its token and of those it emitted after."""
    instance, batch = self._batches.pop(made.work_id)
    counts = {key: s.segment.count for s in made.steps for key in s.tries}
    rows = []
    for row in batch.rows:
      key, start = (row.request_id, row.attempt), row.position
      rows.append(replace(row, position=start + counts.get(key, 0)))
      if not self._fill(instance, row, start, rows[-1].position):
        self.wrong_tokens.add(key)
    if not made.done:
      self._batches[made.work_id] = instance, DecodeBatch(tuple(rows))

  def _fill(
    self,
    instance: str,
    work: PrefillChunk | DecodeRow,
    start: int,
    stop: int,
    content: bytes | None = None,
  ) -> bool:
    """Writes tokens [start, stop); whether those before were there."""
    text, size, right = self.texts[work.request_id], self._page_tokens, True
    for i, page in enumerate(work.pages):
      n = self._filled(i, start)
      for layer in self._layers if n > i * size else ():
        there = self._pages.get((instance, page, layer), b'')
        right &= there.startswith(text[: 4 * n])
    if content is None and not right:
      content = WRONG
    for i in range(start // size, -(-stop // size)):
      n = self._filled(i, stop)
      for layer in self._layers:
        self._pages[instance, work.pages[i], layer] = (
          text[: 4 * n] if content is None else content
        )
    return right

  def _move(self, op: TransferOp, completed: bool) -> None:
    for layer in range(op.start_layer, op.stop_layer):
      if isinstance(op.src, DevicePages):
        contents = tuple(
          self._pages.get((op.src.instance, page, layer), WRONG)
          for page in op.src.pages
        )
      elif medium(op.src.segment) == 'remote':
        contents = self.blocks[op.src.key]
      else:
        contents = self._replicas.get((op.src, layer), ())
      if not completed:
        contents = ()
      if isinstance(op.dst, Replica):
        self._replicas[op.dst, layer] = contents
        continue
      for i, page in enumerate(op.dst.pages):
        self._pages[op.dst.instance, page, layer] = (
          contents[i] if i < len(contents) else WRONG
        )


def output_of(request: Request) -> np.ndarray:
  """The output that is made up for a request: int32 [max_output_tokens]."""
  seed = [*request.request_id.encode()]
  rng = np.random.default_rng(seed)
  return rng.integers(2, 60, request.max_output_tokens).astype(np.int32)

# SPDX-License-Identifier: Apache-2.0
"""What would lie where: contents of pages and replicas, beside a simulation.

A page's content is the prompt up to the last token in it, as its KVCache
depends on all of that. Each layer has its own. Bytes of a dropped replica are
overwritten by other bytes but can still be read, as on devices: whoever reads
them has to notice that its lease is over.
"""

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.segments import medium
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
    self._ops: dict[WorkId, tuple[TransferOp, ...]] = {}
    self.prompts: dict[str, bytes] = {}
    # What a store that others fill holds under a key.
    self.blocks: dict[bytes, tuple[bytes, ...]] = {}
    self.wrong_tokens: set[tuple[str, int]] = set()

  def know(self, request: Request, block_size_tokens: int) -> None:
    """Learns a request's prompt and what its blocks are."""
    assert request.prompt is not None
    prompt = self.prompts[request.request_id] = request.prompt.tobytes()
    pages = block_size_tokens // self._page_tokens
    for i, key in enumerate(request.block_keys):
      self.blocks[key] = tuple(
        prompt[: 4 * (page + 1) * self._page_tokens]
        for page in range(i * pages, (i + 1) * pages)
      )

  def chunk(self, work_id: WorkId, instance: str, work: PrefillChunk) -> None:
    self._works[work_id] = instance, work

  def transfer(self, work_id: WorkId, ops: tuple[TransferOp, ...]) -> None:
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
    ops = self._ops.pop(completion.work_id, ())
    for op, status in zip(ops, completion.op_status):
      if status != 'cancelled':
        self._move(op, status == 'completed')

  def holds(self, request: Request, instance: str, pages, num_tokens) -> bool:
    """Whether pages hold the KVCache of the prompt's first tokens."""
    return all(
      self._pages.get((instance, page, layer), b'').startswith(
        self.prompts[request.request_id][: 4 * n]
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
    prompt = self.prompts[work.request_id]
    right = completed
    for i, page in enumerate(work.pages):
      n = self._filled(i, work.start)
      for layer in self._layers if n > i * self._page_tokens else ():
        content = self._pages.get((instance, page, layer), b'')
        right &= content.startswith(prompt[: 4 * n])
    if work.sampling is not None and completed:
      key = work.request_id, work.attempt
      (self.wrong_tokens.discard if right else self.wrong_tokens.add)(key)
    for i in range(
      work.start // self._page_tokens, -(-work.stop // self._page_tokens)
    ):
      n = self._filled(i, work.stop)
      for layer in self._layers:
        self._pages[instance, work.pages[i], layer] = (
          prompt[: 4 * n] if right else WRONG
        )

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

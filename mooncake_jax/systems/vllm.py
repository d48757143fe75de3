# SPDX-License-Identifier: Apache-2.0
"""vLLM-like instances: each prefills and decodes, with a cache of its own.

The rules are those of vLLM 0.5.1, the baseline of FAST'25 section 5.1
(`vllm/core/scheduler.py`, defaults of `vllm/config.py`):

  plain: prompts first. A step takes whole prompts, first come first served, up
    to `max_num_batched_tokens` (the model's length) and the free memory, and
    nobody decodes in it; a step without prompts gives each row a token.
  chunked prefill: decoding first. A step gives each row a token and fills the
    rest of its 512 tokens with the prompt begun and then the next ones.
  prefix caching: blocks stay in device memory and are found by their chain of
    hashes. Plain prompts fill a step's tokens as if nothing were cached.
  memory: one pool for all; where a row finds no page the youngest one starts
    anew, as the first of the queue, with what it has emitted as its prompt.

0.5.1 can't chunk and cache at once; here both together are what later versions
do. Not from vLLM: which instance gets a request (FAST'25 does not say how the
baseline's load was balanced). It is the one with the least tokens left to
prefill, then with the fewest requests: whatever is cached there, or
('least_uncached') counting those of this request that are not, as routers that
know of caches do. Prompts that share a step take `CostModel.pass_s`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args
from typing import Literal

from mooncake_jax.blocks.accounting import pages_for
from mooncake_jax.costs.model import check_count
from mooncake_jax.costs.model import CostModel
from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord
from mooncake_jax.systems.coupled import Coupled
from mooncake_jax.systems.coupled import Rules
from mooncake_jax.systems.coupled import WATERMARK
from mooncake_jax.systems.coupled import watermark_pages

Routing = Literal['least_tokens', 'least_uncached']


@dataclass(frozen=True)
class VllmSpec:
  """So many coupled instances.

  Attributes:
    instances: how many.
    prefix_caching, chunked_prefill: vLLM's options of these names.
    step_tokens: `max_num_batched_tokens`; None is vLLM's default: 512 with
      chunked prefill, else max_tokens.
    max_batch: `max_num_seqs`.
    max_tokens: `max_model_len`, of prompt and output.
    pool_tokens: KVCache of an instance's devices.
    page_tokens: vLLM's block size.
    routing: see above.

  Raises:
    ValueError: a number below 1, a pool that can't hold one request, or an
      unknown routing.
  """

  instances: int = 16
  prefix_caching: bool = False
  chunked_prefill: bool = False
  step_tokens: int | None = None
  max_batch: int = 256
  max_tokens: int = 131_072
  pool_tokens: int = 1_300_000
  page_tokens: int = 16
  routing: Routing = 'least_tokens'

  def __post_init__(self):
    if self.routing not in get_args(Routing):
      raise ValueError(
        f'VllmSpec.routing={self.routing!r} is not one of '
        f'{", ".join(get_args(Routing))}'
      )
    for name in (
      'instances',
      'max_batch',
      'max_tokens',
      'pool_tokens',
      'page_tokens',
    ):
      check_count(f'VllmSpec.{name}', getattr(self, name))
    if self.step_tokens is not None:
      check_count('VllmSpec.step_tokens', self.step_tokens)
    most = self.rules.num_pages - watermark_pages(self.rules.num_pages)
    if pages_for(self.max_tokens, self.page_tokens) > most:
      raise ValueError(
        f'VllmSpec.pool_tokens={self.pool_tokens} cannot hold one request of '
        f'max_tokens={self.max_tokens} and leave {WATERMARK:.0%} free'
      )

  @property
  def rules(self) -> Rules:
    """What an instance goes by."""
    whole = self.step_tokens or self.max_tokens
    chunk = self.step_tokens or 512
    return Rules(
      self.prefix_caching,
      self.chunked_prefill,
      chunk if self.chunked_prefill else whole,
      self.max_batch,
      self.pool_tokens // self.page_tokens,
      self.page_tokens,
    )


def serve_vllm(
  requests: Sequence[Request],
  spec: VllmSpec,
  costs: CostModel,
  block_size_tokens: int,
) -> list[RequestRecord]:
  """Serves all requests; one record each, in order of arrival.

  Args:
    requests: with keys of blocks of `block_size_tokens`.
    costs: seconds of chunks and decode steps.

  Raises:
    ValueError: block_size_tokens is no multiple of page_tokens.
  """
  instances = [
    Coupled(f'vllm{i}', spec.rules, costs, block_size_tokens)
    for i in range(spec.instances)
  ]
  records = []
  for request in sorted(requests, key=lambda request: request.arrival_s):
    now_s = request.arrival_s
    record = RequestRecord(
      request.request_id,
      request.num_prompt_tokens,
      now_s,
      placed_s=now_s,
      reuse_known=request.reuse_known,
    )
    records.append(record)
    length = request.num_prompt_tokens + request.max_output_tokens
    if length > spec.max_tokens:
      record.outcome, record.finished_s = 'failed', now_s
      record.reason, record.placed_s = 'too long', None
      continue
    for instance in instances:
      instance.advance(now_s)
    least = min(
      instances,
      key=lambda instance: (
        instance.load_with(request)
        if spec.routing == 'least_uncached'
        else instance.load(now_s)
      ),
    )
    least.submit(request, record)
  for instance in instances:
    instance.finish()
  return records

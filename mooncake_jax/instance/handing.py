# SPDX-License-Identifier: Apache-2.0
"""Handing a run's KVCache over to its decode instance, page by page."""

from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.instance.run import Effects
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.run import Start
from mooncake_jax.instance.run import Work


def hand_over(
  instance: str,
  layout: KVLayout,
  run: Run,
  num_tokens: int,
  after: tuple[Work, ...],
) -> Effects:
  """Sends pages of the first tokens that were not sent before.

  Whole pages, and with the prompt's last token the rest; one op a layer range,
  as `after` computes or brings it.
  """
  first, last = run.handed_pages, num_tokens // layout.page_tokens
  if num_tokens == run.request.num_prompt_tokens:
    last = layout.pages_for(num_tokens)
  if last == first:
    return []
  run.handed_pages = last
  run.handoffs_open += 1
  src = DevicePages(instance, run.prefill_pages[first:last])
  dst = DevicePages(run.placement.decode, run.decode_pages[first:last])
  ops = tuple(
    TransferOp(src, dst, *layers, layout.part_bytes(last - first, layers))
    for layers in layout.layer_ranges
  )
  return [Start(Work('handoff', instance, ops, run, after=after))]

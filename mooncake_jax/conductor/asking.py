# SPDX-License-Identifier: Apache-2.0
"""The question a policy is asked, out of the view."""

import hashlib

import numpy as np

from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.conductor.prefill_load import LinkWaits
from mooncake_jax.conductor.question import Question
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.view import View
from mooncake_jax.request import Request


def question(
  view: View,
  rules: ConductorSpec,
  request: Request,
  now_s: float,
  able_I: np.ndarray,
) -> Question:
  """What is believed about `request` at `now_s`; changes nothing.

  Args:
    able_I: who may take it.
  """
  size = len(view.fleet.names)
  usable_I = np.zeros(size, np.int64)
  slow_I = fast_I = view.fleet.no_blocks_I
  holders, remote_blocks, tiers = [], 0, False
  if view.reuse:
    reusable = view.layout.reusable_blocks(request.num_prompt_tokens)
    matches = view.index.match(request.block_keys[:reusable])
    for usable, slow, fast, mask in matches.groups():
      rows = view.rows(mask)
      usable_I[rows] = usable
      if slow or fast:
        if not tiers:
          tiers, slow_I, fast_I = True, slow_I.copy(), fast_I.copy()
        slow_I[rows], fast_I[rows] = slow, fast
    for blocks, mask in matches.sources():
      rows = view.rows(mask)
      if len(rows):
        holders.append((blocks, rows))
    if REMOTE in view.index.positions:
      position = view.index.positions[REMOTE]
      remote_blocks = matches.at(position).stored
  return Question(
    request.num_prompt_tokens,
    view.layout.block_size_tokens,
    view.fleet,
    usable_I,
    holders,
    slow_I,
    fast_I,
    tiers,
    view.queue_error.factor * view.prefill.queue_s_I(now_s),
    LinkWaits(view.prefill, now_s),
    view.prefill_error.factor_I,
    view.transfer_error.factor_I,
    able_I,
    remote_blocks,
    view.overlap,
    rules.balancing_threshold,
    rules.work_weight,
  )


def draw(rules: ConductorSpec, request: Request, attempt: int) -> int:
  """A number of this try's own: equal requests draw equally, others freely."""
  text = f'{rules.seed}:{attempt}:{request.request_id}'
  digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'little')

# SPDX-License-Identifier: Apache-2.0
"""The question a policy is asked, out of the view."""

import hashlib

import numpy as np

from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.conductor.matches import Matches
from mooncake_jax.conductor.matches import position_array
from mooncake_jax.conductor.prefill_load import LinkWaits
from mooncake_jax.conductor.question import Question
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.view import View
from mooncake_jax.request import Request


def question(
  view: View, rules: ConductorSpec, request: Request, now_s: float
) -> Question:
  """What is believed about `request` at `now_s`; changes nothing."""
  num_instances = len(view.fleet.names)
  prefix_4I = np.zeros((4, num_instances + 1), np.int64)
  remote_blocks = 0
  if view.reuse:
    reusable = view.layout.reusable_blocks(request.num_prompt_tokens)
    matches = view.index.match(request.block_keys[:reusable])
    _fill(prefix_4I, matches, view.row_of_position)
    if REMOTE in view.index.positions:
      position = view.index.positions[REMOTE]
      remote_blocks = matches.at(position).stored
  usable_I, slow_I, fast_I, stored_I = prefix_4I[:, :num_instances]
  return Question(
    request.num_prompt_tokens,
    view.layout.block_size_tokens,
    view.fleet,
    usable_I,
    stored_I,
    slow_I,
    fast_I,
    view.queue_error.factor * view.prefill.queue_s_I(now_s),
    LinkWaits(view.prefill, now_s),
    view.prefill_error.factor_I,
    view.transfer_error.factor_I,
    view.prefill.accepts_I,
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


def pick(score_I: np.ndarray, able_I: np.ndarray, number: int) -> int:
  """The able row of least score; of equal ones the number-th, round and round.

  At least one must be able.
  """
  score_I = np.where(able_I, score_I, np.inf)
  best = (score_I == score_I.min()).nonzero()[0]
  return int(best[number % len(best)])


def _fill(prefix_4I: np.ndarray, matches: Matches, row_of: np.ndarray) -> None:
  """Writes usable, slow, fast and stored blocks of all that match.

  Row -1, of who does not prefill, is the last column, which nobody reads.
  """
  usable_I, slow_I, fast_I, stored_I = prefix_4I
  for usable, slow, fast, mask in matches.groups():
    rows = _rows(mask, row_of)
    usable_I[rows] = usable
    if slow:
      slow_I[rows] = slow
    if fast:
      fast_I[rows] = fast
  for blocks, mask in matches.sources():
    stored_I[_rows(mask, row_of)] = blocks


def _rows(mask: int, row_of: np.ndarray) -> np.ndarray | int:
  """Prefill rows of a mask of index positions; a number where it is one."""
  if mask & (mask - 1):
    return row_of[position_array(mask)]
  return row_of[mask.bit_length() - 1]

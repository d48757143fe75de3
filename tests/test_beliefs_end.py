# SPDX-License-Identifier: Apache-2.0
"""What is believed for the sake of a request goes when its time is over."""

from dataclasses import replace

import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import make_conductor
from lifecycle import make_request
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Cancelled
from mooncake_jax.events import PrefillDone
from mooncake_jax.request import Placement
from mooncake_jax.slo import SLO


def test_links_planned_for_who_is_cancelled_are_free_again():
  """Ten of one prefix leave at once: the next waits for its own alone."""
  costs = replace(COSTS, onload_bytes_per_s=1e6)
  spec = replace(SPEC, prefill_instances=1, decode_instances=1)
  rules = ConductorSpec(policy='cost_based', admission='none', correct=False)
  conductor = Conductor(rules, spec, MODEL, costs, SLO())
  prompt = np.full(90, 3)
  first = make_request('first', prompt)
  conductor.observe(BlocksStored(0.0, 'prefill0', first.block_keys))
  alone = conductor.explain(first, 1.0).decision
  for i in range(10):
    conductor.place(make_request(f'x{i}', prompt), 1.0)
  behind = conductor.explain(first, 1.0).decision
  for i in range(10):
    conductor.observe(Cancelled(1.0, f'x{i}', 0, 'prefill0'))
  again = conductor.place(first, 1.0)
  assert isinstance(alone, Placement) and isinstance(behind, Placement)
  assert isinstance(again, Placement)
  assert behind.fetch_s > 5 * alone.fetch_s
  assert again.fetch_s == pytest.approx(alone.fetch_s)


def test_blocks_evicted_while_their_request_decodes_are_not_believed_in():
  spec = replace(SPEC, prefill_instances=1, decode_instances=1)
  conductor = make_conductor(spec, admission='none')
  prompt = np.full(90, 3)
  long = make_request('long', prompt, 50)
  placed = conductor.place(long, 0.0)
  assert isinstance(placed, Placement)
  conductor.observe(BlocksStored(0.1, 'prefill0', long.block_keys))
  conductor.observe(PrefillDone(0.1, 'long', 0, 'prefill0', 0.0, 90))
  again = make_request('again', prompt)
  believed = conductor.explain(again, 0.2).decision
  conductor.observe(BlocksEvicted(0.3, 'prefill0', long.block_keys))
  known = conductor.place(again, 0.4)
  assert isinstance(believed, Placement) and isinstance(known, Placement)
  assert believed.reused_blocks == 11
  assert known.reused_blocks == 0

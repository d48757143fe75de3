# SPDX-License-Identifier: Apache-2.0
"""Prefixes on an SSD: costs that are true stay so, and reads are queued."""

from dataclasses import replace

import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import make_request
from lifecycle import make_virtual
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.request import Placement
from mooncake_jax.serve import serve
from mooncake_jax.slo import SLO

BLOCK_BYTES = SPEC.layout(MODEL).block_bytes
PROMPTS = [np.full(90, 2 + i) for i in range(4)]
# Eleven blocks take 5 ms from the SSD, and 10 ms to compute.
SLOW = replace(
  COSTS,
  ssd_read_bytes_per_s=11 * BLOCK_BYTES / 5e-3,
  ssd_read_latency_s=0.0,
)
ALONE = replace(
  SPEC,
  prefill_instances=1,
  decode_instances=1,
  host_bytes=12 * BLOCK_BYTES,
  ssd_bytes=1 << 24,
  promote_hits=1000,
)


def test_corrections_leave_true_costs_alone_where_prefixes_lie_on_an_ssd():
  """They are learnt as no slower: neither compute that waits for layers nor an
  SSD taken for host memory. Blocks beyond the first on the SSD count as being
  there too, so that reads may be learnt as faster."""
  requests = [
    make_request(f'r{i}', PROMPTS[i % len(PROMPTS)], arrival_s=0.2 * i)
    for i in range(40)
  ]
  rules = ConductorSpec(policy='cost_based', admission='none')
  conductor = Conductor(rules, ALONE, MODEL, SLOW, SLO())
  records, _ = serve(requests, conductor, make_virtual(ALONE, SLOW))
  read = sum(r.reused_tokens.get('local_ssd', 0) for r in records)
  assert read > 20 * 88
  view = conductor.view
  assert view.prefill_error.factor_I.item(0) == pytest.approx(1.0, abs=0.02)
  assert view.transfer_error.factor_I.item(0) < 1.02


def test_a_read_from_an_ssd_waits_for_those_before_it():
  rules = ConductorSpec(policy='cost_based', admission='none', correct=False)
  conductor = Conductor(rules, ALONE, MODEL, SLOW, SLO())
  requests = [make_request(f'r{i}', p) for i, p in enumerate(PROMPTS)]
  for request in requests:
    keys = request.block_keys
    conductor.observe(BlocksStored(0.0, 'prefill0', keys))
    conductor.observe(BlocksStored(0.0, 'prefill0', keys, 'ssd'))
    conductor.observe(BlocksEvicted(0.0, 'prefill0', keys))
  placed = [conductor.place(request, 1.0) for request in requests]
  for i, at in enumerate(placed):
    assert isinstance(at, Placement)
    assert (at.ssd_blocks, at.host_blocks) == (11, 0)
    assert at.fetch_s == pytest.approx(5e-3 * (i + 1))

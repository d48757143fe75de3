# SPDX-License-Identifier: Apache-2.0
"""The gateway's benchmark: its clients and what it makes of their answers."""

import asyncio
from dataclasses import replace

from gateway_pieces import running
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.gateway.limits import GatewaySpec
from mooncake_jax.slo import SLO
from scripts.benches.gateway import overload_rows
from scripts.benches.gateway import SIMULATED
from scripts.benches.http_load import Answer
from scripts.benches.http_load import ask
from scripts.benches.http_load import at_a_rate
from tiny_experiment import tiny

BODY = {'model': 'tiny', 'prompt': 'a b c', 'max_tokens': 6}


def test_clients_take_the_time_of_every_token_and_of_refusals():
  rules = ConductorSpec(admission='early_rejection')
  served = tiny(
    backend='virtual', gateway=GatewaySpec(model_name='tiny'), conductor=rules
  )
  with running(served) as server:
    answer = asyncio.run(ask(server.port, BODY))
    all_of_them = asyncio.run(at_a_rate(server.port, [BODY] * 5, 100.0))
  assert answer.status == 200 and answer.call_id.startswith('cmpl-')
  assert answer.token_s == sorted(answer.token_s)
  assert 1 <= len(answer.token_s) <= 6
  assert 0 < answer.ttft_s <= answer.took_s
  assert [each.status for each in all_of_them] == [200] * 5
  strict = replace(served, slo=SLO(ttft_s=1e-6, tbt_s=1.0))
  with running(strict) as server:
    refused = asyncio.run(ask(server.port, BODY))
  assert refused.status == 429 and not refused.token_s and refused.took_s > 0


def test_what_is_kept_is_counted_of_what_was_accepted():
  answers = [
    Answer(200, 0.0, 9.0, [2.0, 2.1]),
    Answer(200, 1.0, 9.0, [5.0]),
    Answer(429, 2.0, 2.02),
    Answer(503, 2.0, 2.5),
  ]
  kept, refused, grown = overload_rows(SIMULATED, answers, 0.01)
  assert kept.value == 0.5 and '1 others' in kept.reference and not kept.ok
  assert refused.ok and abs((refused.value or 0) - 20) < 1e-6
  assert grown.ok

# SPDX-License-Identifier: Apache-2.0
"""The chunk size that suits nodes that do both: by requests, then by TTFT."""

from dataclasses import replace

from mooncake_jax.metrics.summary import summarize
from mooncake_jax.slo import SLO
from scripts.benches.colocated import suits


def test_more_effective_requests_suit_better_than_a_shorter_ttft():
  some = summarize([], SLO())
  few = replace(some, effective_request_capacity=0.9, ttft_s={'mean': 1.0})
  many = replace(some, effective_request_capacity=0.95, ttft_s={'mean': 3.0})
  fast = replace(many, ttft_s={'mean': 2.0})
  assert max((few, many, fast), key=suits) is fast

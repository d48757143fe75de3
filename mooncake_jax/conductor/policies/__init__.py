# SPDX-License-Identifier: Apache-2.0
"""Where to prefill: policies, functions of one signature."""

from mooncake_jax.conductor.policies.cost_based import cost_based
from mooncake_jax.conductor.policies.paper import cache_aware
from mooncake_jax.conductor.policies.paper import kvcache_centric
from mooncake_jax.conductor.policies.paper import load_balancing
from mooncake_jax.conductor.policies.paper import random
from mooncake_jax.conductor.question import Policy

POLICIES: dict[str, Policy] = {
  'random': random,
  'load_balancing': load_balancing,
  'cache_aware': cache_aware,
  'kvcache_centric': kvcache_centric,
  'cost_based': cost_based,
}

# SPDX-License-Identifier: Apache-2.0
"""What links carried: counted once at each end, and as long as it takes."""

from dataclasses import replace

import pytest

from lifecycle import COSTS
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.backend import LinkUse
from mooncake_jax.metrics.links import link_figures
from mooncake_jax.workload.generate import conversation
from mooncake_jax.workload.scale import TraceScale
from scripts.serving import backends
from scripts.serving import prepare
from scripts.serving import serve_once
from scripts.workloads import TraceWorkload
from tiny_experiment import tiny


def served(**changes):
  scale = TraceScale(length_scale=1 / 256, max_prompt_tokens=100)
  workload = TraceWorkload(conversation(60), scale)
  experiment = tiny(backend='virtual', workload=workload, **changes)
  config = experiment.model.read_config()
  with backends(experiment, config) as make_backend:
    backend, prepared = make_backend(), prepare(experiment, config)
    outcome = serve_once(experiment, config, prepared, backend)
  return outcome, backend.link_uses()


def test_what_leaves_over_the_network_arrives():
  outcome, uses = served()
  found = outcome.summary.link_bytes
  assert found['out'] == found['in'] > 0
  kinds = {kind for kind, _ in uses}
  assert kinds >= {'out', 'in', 'onload', 'offload'}


def test_all_of_every_prompt_is_handed_over_once():
  """Without reuse nothing else is on the network."""
  outcome, _ = served(cluster=replace(SPEC, reuse=False))
  layout, size = SPEC.layout(MODEL), SPEC.page_tokens
  # Whole pages go.
  pages = sum(-(-record.prompt_tokens // size) for record in outcome.records)
  num_bytes = pages * size * layout.token_layer_bytes * layout.num_layers
  assert outcome.summary.link_bytes['out'] == num_bytes


def test_utilisation_is_what_the_bytes_take_over_the_run():
  outcome, uses = served()
  summary = outcome.summary
  per_byte_s = {
    'onload': 1 / COSTS.onload_bytes_per_s,
    'offload': 1 / COSTS.offload_bytes_per_s,
  }
  for (kind, name), use in uses.items():
    if kind in per_byte_s:
      alone_s = use.num_bytes * per_byte_s[kind]
      assert use.used_s == pytest.approx(alone_s), (kind, name)
    assert 0 <= use.used_s <= summary.duration_s
  for kind, shares in summary.link_utilisation.items():
    assert 0 < shares['mean'] <= shares['max'] <= 1, kind


def test_links_that_carried_nothing_are_left_out():
  uses = {
    ('out', 'a'): LinkUse(100, 2.0),
    ('out', 'b'): LinkUse(50, 1.0),
    ('out', 'c'): LinkUse(0, 0.0),
    ('in', 'a'): LinkUse(0, 0.0),
  }
  figures = link_figures(uses, 10.0)
  assert figures.link_bytes == {'out': 150}
  assert figures.link_utilisation['out'] == pytest.approx(
    {'mean': 0.15, 'max': 0.2}
  )
  assert link_figures({}, 0.0) == ({}, {})

# SPDX-License-Identifier: Apache-2.0
"""However KVCache streams and through whatever stages: the same tokens."""

from dataclasses import replace

import numpy as np
import pytest

from lifecycle import close
from lifecycle import COSTS
from lifecycle import make_device
from lifecycle import make_request
from lifecycle import make_virtual
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.events import Finished
from mooncake_jax.events import PrefixFetched
from mooncake_jax.events import TokensEmitted
from mooncake_jax.request import Placement
from mooncake_jax.request import Sampling

HEAD = np.arange(41) * 7 % 50 + 2
# (name, prompt, prefill instance): computed, read from another instance's
# host memory, from its own, all but the last token, and behind each other.
LIVES = [
  [('computed', HEAD, 'prefill0')],
  [('remote', np.append(HEAD, [3, 4, 5] * 9), 'prefill1')],
  [
    ('local', np.append(HEAD, [9] * 13), 'prefill0'),
    ('full', HEAD, 'prefill0'),
    ('other', HEAD * 3 % 50 + 2, 'prefill0'),
  ],
]
SPECS = {
  'prompt': replace(SPEC, streaming='prompt'),
  'chunks': replace(SPEC, streaming='chunks'),
  'layers': SPEC,
  'layers, 2 stages': replace(SPEC, stages=2, stage_layers=(2, 1)),
  'chunks, 2 stages': replace(SPEC, stages=2, streaming='chunks'),
  'layers, 3 stages': replace(SPEC, stages=3, layers_per_transfer=1),
  'spmd': replace(SPEC, stages=3, executor='spmd'),
  'dynamic': replace(SPEC, chunking='dynamic', streaming='prompt'),
  'auto': replace(SPEC, stages=2, chunking='auto'),
  'device cache': replace(
    SPEC, stages=2, device_cache_tokens=128, prefill_pool_tokens=128
  ),
}
# The others need more programs than tests should compile.
ON_DEVICES = [m for m in SPECS if m not in ('prompt', 'auto')]


def serve_lives(cluster, lives=LIVES):
  """Tokens by request, and what it reused."""
  tokens, reused, ended = {}, {}, set()
  for together in lives:
    for name, prompt, prefill in together:
      request = make_request(
        name,
        prompt,
        6,
        cluster.backend.now_s(),
        sampling=Sampling(logprobs=1),
      )
      fetch = {'fetch_blocks': 5, 'fetch_from': 'prefill0'}
      extra = fetch if name == 'remote' else {}
      cluster.submit(request, Placement(name, 0, prefill, 'decode0', **extra))
    while not cluster.idle:
      for event in cluster.step(None):
        cluster.check()
        if isinstance(event, TokensEmitted):
          for row in event.emitted.rows:
            tokens.setdefault(row.request_id, []).extend(row.tokens)
            likeliest = [found.top[0][0] for found in row.logprobs]
            assert likeliest == [*row.tokens]  # greedy, the first one too
        elif isinstance(event, PrefixFetched):
          reused[event.request_id] = (
            event.device_tokens,
            event.local_tokens,
            event.ssd_tokens,
            event.remote_tokens,
          )
        elif isinstance(event, Finished):
          ended.add(event.request_id)
  assert ended == set(tokens)
  return tokens, reused


@pytest.fixture(scope='module')
def plain_tokens():
  cluster = make_device(SPECS['prompt'])
  tokens, _ = serve_lives(cluster)
  close(cluster)
  assert all(len(t) == 6 for t in tokens.values())
  return tokens


def _reuses(spec: ClusterSpec) -> dict[str, tuple[int, ...]]:
  own = (40, 0, 0, 0) if spec.device_cache_tokens else (0, 40, 0, 0)
  return {
    'computed': (0, 0, 0, 0),
    'remote': (0, 0, 0, 40),
    'local': own,
    'full': own,
    'other': (0, 0, 0, 0),
  }


@pytest.mark.parametrize('mode', SPECS)
def test_a_mode_reuses_what_the_plan_says_in_virtual_time(mode):
  spec = SPECS[mode]
  assert serve_lives(make_virtual(spec))[1] == _reuses(spec)


@pytest.mark.parametrize('mode', ON_DEVICES)
def test_a_mode_gives_the_tokens_of_the_whole_prompt(mode, plain_tokens):
  spec = SPECS[mode]
  cluster = make_device(spec)
  tokens, reused = serve_lives(cluster)
  close(cluster)
  assert tokens == plain_tokens
  assert reused == _reuses(spec)


def test_a_prefix_on_the_ssd_streams_too(plain_tokens, tmp_path):
  """Others push the first one's blocks out of host memory, onto the SSD."""
  block_bytes = SPEC.layout(MODEL).block_bytes
  spec = replace(
    SPEC,
    stages=2,
    host_bytes=10 * block_bytes,
    ssd_bytes=100 * block_bytes,
    ssd_url=tmp_path.as_uri(),
    lease_s=0.01,
  )
  cluster = make_device(spec)
  rng = np.random.default_rng(0)
  tokens, reused = serve_lives(cluster, LIVES[:1])
  for name in ('x', 'y', 'z'):
    cluster.step(cluster.backend.now_s() + 0.2)
    serve_lives(cluster, [[(name, rng.integers(2, 60, 41), 'prefill0')]])
  again, reused = serve_lives(cluster, [LIVES[2][:1]])
  close(cluster)
  assert again['local'] == plain_tokens['local']
  assert tokens['computed'] == plain_tokens['computed']
  assert reused['local'][2] and sum(reused['local']) == 40


def test_sizes_by_costs_need_costs():
  for chunking in ('dynamic', 'auto'):
    with pytest.raises(ValueError, match='costs'):
      make_virtual(replace(SPEC, chunking=chunking), costs=None)


def test_a_pipeline_makes_a_long_prompt_small_chunks_and_a_short_one_none():
  costs = replace(COSTS, prefill_base_s=1e-4, prefill_s_per_token=1e-3)
  for stages, num_tokens, size in ((1, 500, 48), (3, 12, 12), (3, 500, 12)):
    spec = replace(SPEC, stages=stages, chunking='auto', chunk_tokens=48)
    cluster = make_virtual(spec, costs=costs)
    stops = cluster.prefill['prefill0'].plan.stops(num_tokens, 0)
    assert stops[0] == size, stops

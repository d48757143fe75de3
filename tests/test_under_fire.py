# SPDX-License-Identifier: Apache-2.0
"""200 requests on devices under pressure, cancels and losses: right tokens."""

from collections import Counter
from dataclasses import replace

import jax
from jax import numpy as jnp
import numpy as np

from engine_pieces import MODEL
from engine_pieces import tiny_params
from lifecycle import close
from lifecycle import make_conductor
from lifecycle import make_device
from lifecycle import make_request
from lifecycle import SPEC
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import KVArrived
from mooncake_jax.events import Preempted
from mooncake_jax.model import forward
from mooncake_jax.model.pages import init_pool
from mooncake_jax.serve import serve

LENGTH, PAGE, GAP = 96, 16, 1e-3
COUNT = 200
TIGHT = replace(
  SPEC,
  max_tokens=LENGTH,
  decode_pool_tokens=112,
  decode_reserve='prompt',
  device_cache_tokens=48,
  host_bytes=60 * 8 * 3 * 128,
)


@jax.jit
def _logits_TV(params, tokens_T):
  """Of one whole text, in one go and in a pool of its own."""
  num_pages = LENGTH // PAGE + 1
  x_1TD, _ = forward.stage_fn(
    params['layers'],
    MODEL,
    forward.embed(params, tokens_T[None]),
    init_pool(MODEL, num_pages, PAGE, jnp.float32),
    jnp.arange(1, num_pages, dtype=jnp.int32)[None],
    jnp.zeros(1, jnp.int32),
    jnp.full(1, LENGTH, jnp.int32),
  )
  return forward.unembed(params, MODEL, x_1TD[0])


def num_right(prompt, output) -> int:
  """Checks that an output is greedy, up to the first step without a gap.

  Each token must be the likeliest after those before it: so all are what
  generating alone gives.
  """
  text = np.zeros(LENGTH, np.int32)
  text[: len(prompt)] = prompt
  text[len(prompt) : len(prompt) + len(output)] = output
  logits_TV = np.asarray(_logits_TV(tiny_params(), text))
  for i, token in enumerate(output):
    logits_V = logits_TV[len(prompt) + i - 1]
    second, first = np.sort(logits_V)[-2:]
    if first - second < GAP:
      return i
    assert token == np.argmax(logits_V), (i, output)
  return len(output)


def requests():
  """Three heads, tails of any length, some long outputs; 2 ms apart."""
  rng = np.random.default_rng(7)
  heads = [rng.integers(2, MODEL.vocab_size, 32) for _ in range(3)]
  made = []
  for i in range(COUNT):
    head = heads[rng.integers(3)][: rng.choice((0, 16, 32))]
    tail = rng.integers(2, MODEL.vocab_size, rng.integers(1, 16))
    output = int(rng.choice((1, 5, 20, 40)))
    prompt = np.concatenate([head, tail])
    made.append(make_request(f'r{i}', prompt, output, 0.002 * i))
  return made


class Fire:
  """Cancels some requests, and takes instances away and back."""

  def __init__(self, cluster):
    self.cluster = cluster
    self.seen = Counter()
    self.lost = Counter()

  def __call__(self, event):
    self.cluster.check()
    kind = type(event)
    self.seen[kind] += 1
    match event, self.seen[kind]:
      case KVArrived(), n if n % 11 == 0:
        self.cluster.cancel(event.request_id)
      case Preempted(), n if n % 7 == 0:
        self.cluster.cancel(event.request_id)
      case Failed(), _:
        assert event.retryable, event
        self.lost[event.instance] += 1
      case Finished(), 40:
        self.cluster.lose('decode1')
      case Finished(), 70:
        self.cluster.join('decode1')
      case Finished(), 90:
        self.cluster.lose('prefill0')
      case Finished(), 120:
        self.cluster.join('prefill0')


def test_every_request_has_the_tokens_of_its_own():
  cluster = make_device(TIGHT)
  fire, asked = Fire(cluster), requests()
  conductor = make_conductor(TIGHT, admission='none', max_attempts=9)
  try:
    records, _ = serve(asked, conductor, cluster, on_event=fire)
  finally:
    close(cluster)
  assert cluster.idle
  outcomes = Counter(r.outcome for r in records)
  assert outcomes.keys() == {'completed', 'cancelled'}, outcomes
  assert fire.seen[Preempted] >= 10 and outcomes['cancelled'] >= 10
  assert fire.lost.keys() <= {'decode1', 'prefill0'} and fire.lost['decode1']
  compared = 0
  for record, request in zip(records, asked):
    assert record.request_id == request.request_id
    if record.outcome == 'completed':
      assert len(record.output_tokens) == request.max_output_tokens
    compared += num_right(request.prompt, record.output_tokens)
  # The gap leaves most of them to compare.
  assert compared > 0.7 * sum(len(r.output_tokens) for r in records)

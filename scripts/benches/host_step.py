# SPDX-License-Identifier: Apache-2.0
"""The host's own time of a decode step: what its thread computes, not waits.

Dispatching the next step, reading and reporting the last one's tokens (the
owner's thread), and deciding on what was reported (the loop's).
"""

import time

import jax

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DecodeRow
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine.decode_run import DecodeRun
from mooncake_jax.engine.decode_run import DecodeTask
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.instance.decode import DecodeInstance
from mooncake_jax.instance.run import Run
from mooncake_jax.model.params import init_params
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from scripts.benches.model import CONFIG
from scripts.benches.model import PAGE_TOKENS
from scripts.benches.rows import Row

BATCH = 32
CONTEXT = 128
MOST_S = 300e-6


def host_rows(quick: bool) -> list[Row]:
  """Seconds a step at batch 32, of the owner's thread and of the loop's."""
  steps = 8 if quick else 30
  owner_s, completions = _owner_s(steps)
  loop_s = _loop_s(completions)
  what = 'dispatch, read and report, CPU-seconds of its thread'
  name = f'decode.host.{BATCH}_rows'
  return [
    Row(f'{name}.owner_s', owner_s, 's', what),
    Row(f'{name}.loop_s', loop_s, 's', 'deciding on the tokens, CPU-seconds'),
    Row(
      f'{name}.step_s',
      owner_s + loop_s,
      's',
      'both together',
      target=MOST_S,
      at_most=True,
    ),
  ]


def _owner_s(steps: int) -> tuple[float, list[Completion]]:
  """The least step's, and what the steps reported."""
  layout = KVLayout(
    CONFIG.num_layers,
    2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4,
    PAGE_TOKENS,
    PAGE_TOKENS,
    CONFIG.num_layers,
  )
  pages = layout.pages_for(CONTEXT + steps + 2)
  spec = InstanceSpec(
    'decode0',
    'decode',
    num_pages=1 + BATCH * pages,
    max_tokens=pages * PAGE_TOKENS,
    max_batch=BATCH,
    batch_buckets=(BATCH,),
  )
  params = init_params(CONFIG, jax.random.key(0))
  told: list[Completion] = []
  with DeviceBackend(CONFIG, layout, [spec], params) as backend:
    model = backend.instances['decode0'].stages[0].desk.model
    assert model is not None
    with jax.set_mesh(model.pool.mesh):  # its owner has nothing to do
      batch = DecodeBatch(tuple(_row(i, pages, steps) for i in range(BATCH)))
      task = DecodeTask(0, batch, steps, time.perf_counter, told.append)
      run = DecodeRun(task, model)
      taken = [_thread_s(run.advance) for _ in range(steps)]
  return min(taken[1:-1]), told  # the first and last do less


def _row(i: int, pages: int, steps: int) -> DecodeRow:
  own = tuple(range(1 + i * pages, 1 + (i + 1) * pages))
  return DecodeRow(f'request{i}', 0, 1, CONTEXT - 1, own, steps)


def _loop_s(completions: list[Completion]) -> float:
  """The least of a decode instance's times for the completions."""
  layout = KVLayout(1, 4, PAGE_TOKENS, PAGE_TOKENS, 1)
  output = len(completions) + 9
  num_pages = BATCH * layout.pages_for(CONTEXT + output) + 1
  instance = DecodeInstance('decode0', layout, num_pages, BATCH, 1)
  for i in range(BATCH):
    request = Request(f'request{i}', 0.0, CONTEXT, output)
    run = Run(request, Placement(request.request_id, 0, 'p', 'decode0'))
    run.last_token = 1
    assert instance.reserve(run)
    instance.join(run)
  instance.advance()
  assert len(instance.runs) == BATCH
  taken = [
    _thread_s(lambda c=c: instance.on_decode(c))
    for c in completions
    if not c.done
  ]
  return min(taken)


def _thread_s(work) -> float:
  start_s = time.thread_time()
  work()
  return time.thread_time() - start_s

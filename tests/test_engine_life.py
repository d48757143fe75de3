# SPDX-License-Identifier: Apache-2.0
"""The device backend from its start to its end, and when parts of it die."""

from dataclasses import replace
import gc
import itertools
import threading
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from engine_pieces import decode_row
from engine_pieces import Desk
from engine_pieces import LAYOUT
from engine_pieces import MODEL
from engine_pieces import ops_of
from engine_pieces import random_tokens
from engine_pieces import tiny_backend
from engine_pieces import tiny_params
from engine_pieces import tiny_spec
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.model.params import init_params
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.ssd import SsdSegment


def test_close_leaves_no_threads():
  before = set(threading.enumerate())
  with tiny_backend(tiny_spec('a'), tiny_spec('b', num_devices=2)) as backend:
    assert len(set(threading.enumerate()) - before) == 8
    desk = Desk(backend)
    desk.prefill('a', random_tokens(16, 0), (1, 2, 3, 4))
    row = decode_row('r', 1, 0, range(1, 30), 100)
    backend.decode('a', DecodeBatch((row,)), 100)
    op = TransferOp(DevicePages('a', (1, 2)), Replica('a', 1), 0, 3, 1)
    backend.transfer((op,) * 5, 0, 1e9)
  assert not set(threading.enumerate()) - before


def test_too_few_devices_or_a_name_twice_is_a_clear_error():
  with pytest.raises(ValueError, match="'b': num_devices=8"):
    tiny_backend(tiny_spec('a'), tiny_spec('b', num_devices=8))
  with pytest.raises(ValueError, match='one name'):
    tiny_backend(tiny_spec('a'), tiny_spec('a'))
  before = set(threading.enumerate())
  with pytest.raises(ValueError, match='tensor=3'):
    tiny_backend(tiny_spec('a'), tiny_spec('b', num_devices=3))
  assert not set(threading.enumerate()) - before


@pytest.mark.parametrize('executor', ['mpmd', 'spmd'])
def test_what_can_not_be_made_leaves_nothing_to_the_next_try(
  executor, tmp_path
):
  """Neither the SSD's lock nor the first stage's threads and memory."""
  spec = tiny_spec(
    'a',
    role='prefill',
    executor=executor,
    stage_layers=(1, MODEL.num_layers - 1),
    ssd_url=f'file://{tmp_path}',
    ssd_bytes=1 << 20,
  )
  before = set(threading.enumerate())
  with pytest.raises(ValueError, match='must add up'):
    tiny_backend(replace(spec, stage_layers=(1, 1)))
  loads = itertools.count()

  def load(mesh):
    if next(loads):
      raise MemoryError('of the second stage')
    return tiny_params()

  with pytest.raises(MemoryError, match='second stage'):
    DeviceBackend(MODEL, LAYOUT, [spec], load)
  assert not set(threading.enumerate()) - before
  tiny_backend(spec).close()


def test_a_backend_that_can_not_be_made_lets_go_of_its_stores(tmp_path):
  block = BlockFormat(2, 8, 1, 8, np.dtype('float32'))
  url = f'file://{tmp_path}'
  store = SsdSegment('store', url, 1 << 20, block)
  with pytest.raises(ValueError, match='kv_dtype'):
    tiny_backend(tiny_spec('a'), kv_dtype='bfloat16', wires=[store])
  SsdSegment('store', url, 1 << 20, block).close()


def test_a_lost_pool_fails_all_later_work_of_its_instance_only():
  with tiny_backend(tiny_spec('a'), tiny_spec('c')) as backend:
    desk = Desk(backend)
    backend.instances['a'].stages[0].desk.pool.kv.delete()
    chunk = PrefillChunk('r', 0, 0, 4, (1,), random_tokens(4, 0))
    batch = DecodeBatch((decode_row('r', 1, 0, (1, 2), 8),))
    handoff = ops_of(DevicePages('c', (1,)), DevicePages('a', (1,)))
    for work in (
      backend.prefill('a', chunk),
      backend.decode('a', batch, 8),
      backend.transfer(handoff, 0, 1e9),
    ):
      end = desk.end_of(work)
      assert end.status == 'failed' and 'lost its KV pool' in end.error
    desk.prefill('c', random_tokens(4, 0), (1,))


def test_wait_raises_when_a_thread_of_the_backend_has_died():
  with tiny_backend(tiny_spec('a')) as backend:
    backend.instances['a'].stages[0].owner.post(None)  # type: ignore
    with pytest.raises(RuntimeError, match='a-owner ended by AttributeError'):
      backend.wait(backend.now_s() + 60)


def test_instances_may_load_their_own_slices_of_the_parameters():
  meshes = []

  def load(mesh):
    meshes.append(mesh)
    return init_params(MODEL, jax.random.key(0), mesh=mesh)

  with DeviceBackend(MODEL, LAYOUT, [tiny_spec('a')], load) as backend:
    assert len(meshes) == 1
    expected = Desk(backend).prefill('a', random_tokens(7, 0), (1, 2))
  with tiny_backend(tiny_spec('a')) as backend:
    assert Desk(backend).prefill('a', random_tokens(7, 0), (1, 2)) == expected


def test_loading_takes_little_more_memory_than_the_weights(monkeypatch):
  """And the pool, which may take all the rest, comes after them."""
  many, layout = replace(MODEL, num_layers=12), replace(LAYOUT, num_layers=12)
  gc.collect()  # or what other tests left goes meanwhile
  peak_bytes, before_bytes, stack = 0, _live_bytes(), jnp.stack

  def watched(*args, **kwargs):
    nonlocal peak_bytes
    stacked = stack(*args, **kwargs)
    peak_bytes = max(peak_bytes, _live_bytes() - before_bytes)
    return stacked

  monkeypatch.setattr(jnp, 'stack', watched)

  def load(mesh):
    return init_params(many, jax.random.key(0), mesh=mesh)

  with DeviceBackend(many, layout, [tiny_spec('a')], load) as backend:
    pool_bytes = backend.instances['a'].stages[0].desk.pool.kv.nbytes
  weights = jax.tree.leaves(jax.eval_shape(lambda: load(None)))
  weight_bytes = sum(array.size * array.dtype.itemsize for array in weights)
  assert weight_bytes < pool_bytes
  assert weight_bytes <= peak_bytes < 1.6 * weight_bytes


def _live_bytes() -> int:
  return sum(array.nbytes for array in jax.live_arrays())


def test_what_could_not_start_is_not_under_way():
  """Whatever raised: the clock starts anew only while nothing is."""
  no_op: Any = None
  with tiny_backend(tiny_spec('a')) as backend:
    chunk = PrefillChunk('r', 0, 0, 4, (1,), random_tokens(4, 0))
    batch = DecodeBatch((decode_row('r', 1, 0, (1, 2), 8),))
    for start in (
      lambda: backend.transfer([no_op], 0, 1e9),
      lambda: backend.prefill('b', chunk),
      lambda: backend.decode('b', batch, 8),
    ):
      with pytest.raises((AttributeError, ValueError)):
        start()
    backend.restart_clock()
    assert backend.wait(None) == []
    Desk(backend).prefill('a', random_tokens(16, 0), (1, 2, 3, 4))

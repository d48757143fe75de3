# SPDX-License-Identifier: Apache-2.0
"""Snapshots of pinned pools: what they hold, and runs that begin warm."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from engine_pieces import MODEL
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.transfer.segment import Part
from mooncake_jax.transfer.snapshot import load
from mooncake_jax.transfer.snapshot import save
from mooncake_jax.transfer.snapshot_spec import PoolFormat
from mooncake_jax.transfer.snapshot_spec import SnapshotSpec
from mooncake_jax.workload.trace import TraceRow
from scripts.experiment import Experiment
from scripts.gin_source import ROOT
from scripts.resuming import Preempted
from scripts.serving import backends
from scripts.serving import cluster_of
from scripts.serving import conductor_of
from scripts.serving import Outcome
from scripts.serving import serve_alone
from scripts.warming import pool_format
from scripts.warming import warmed
from scripts.workloads import Rows
from scripts.workloads import TraceWorkload
from tiny_experiment import tiny

FORMAT = PoolFormat('a model', 'float32', 4, 2, 8, 8)


def rows(count: int) -> TraceWorkload:
  """Prompts of 5 blocks, no two alike: a second run alone can reuse any."""
  made = [
    TraceRow(0.01 * i, 40, 4, tuple(range(5 * i, 5 * i + 5)))
    for i in range(count)
  ]
  return TraceWorkload(Rows(made, [], SPEC.block_size_tokens))


def experiment(path: Path, **cluster) -> Experiment:
  return tiny(
    workload=rows(6),
    cluster=replace(SPEC, **cluster),
    snapshot=SnapshotSpec(str(path)),
  )


def tokens(outcome: Outcome) -> dict[str, list[int]]:
  return {r.request_id: r.output_tokens for r in outcome.records}


def test_a_warm_run_hits_and_gives_the_same_tokens(tmp_path):
  cold = serve_alone(experiment(tmp_path))
  assert cold.summary.hit_rate == 0 and cold.summary.completed == 6
  warm = serve_alone(experiment(tmp_path))
  # All but the last block of each prompt, which has the last token.
  assert warm.summary.hit_rate == pytest.approx(32 / 40)
  assert tokens(warm) == tokens(cold)
  assert warm.summary.link_bytes['into_device'] > 0


def test_other_meshes_stages_and_parts_take_the_same_snapshot(tmp_path):
  cold = serve_alone(experiment(tmp_path))
  other = experiment(tmp_path, tensor_parallel=2, layers_per_transfer=3)
  warm = serve_alone(other)
  assert warm.summary.hit_rate == pytest.approx(32 / 40)
  assert tokens(warm) == tokens(cold)
  back = serve_alone(experiment(tmp_path))  # of slices of two devices
  assert back.summary.hit_rate == pytest.approx(32 / 40)
  assert tokens(back) == tokens(cold)


def test_a_smaller_pool_takes_what_was_used_last(tmp_path):
  serve_alone(experiment(tmp_path))
  block_bytes = SPEC.layout(MODEL).block_bytes
  few = experiment(tmp_path, host_bytes=5 * block_bytes)
  saved = load(str(tmp_path), pool_format(few, MODEL))
  assert max(map(len, saved.values())) > 5
  with began(few) as cluster:
    for name, pool in saved.items():
      last = [key for key, _ in pool][-5:]
      assert [*cluster.inventory(name)] == last
    cluster.check()


@contextmanager
def began(wanted: Experiment) -> Iterator[Cluster]:
  """A run's cluster, warm, before its first request."""
  with backends(wanted, MODEL) as make_backend:
    backend, conductor = make_backend(), conductor_of(wanted, MODEL)
    cluster = cluster_of(wanted, MODEL, backend, conductor)
    with warmed(wanted, MODEL, cluster, backend):
      yield cluster


@pytest.mark.parametrize(
  'field, change',
  [
    ('identity', {'identity': 'another model'}),
    ('kv_dtype', {'kv_dtype': 'bfloat16'}),
    ('num_layers', {'num_layers': 6}),
    ('num_kv_heads', {'num_kv_heads': 4}),
    ('block_size_tokens', {'block_size_tokens': 16}),
    ('hash', {'hash': 'builtin'}),
  ],
)
def test_another_format_is_refused_by_its_field(tmp_path, field, change):
  save(str(tmp_path), {'prefill0': blocks(3)}, FORMAT)
  with pytest.raises(ValueError, match=f'snapshot .*{field}='):
    load(str(tmp_path), replace(FORMAT, **change))


def test_a_run_says_why_it_does_not_begin_warm(tmp_path):
  wanted = experiment(tmp_path)
  other = replace(pool_format(wanted, MODEL), identity='another')
  save(str(tmp_path), {'prefill0': blocks(1)}, other)
  with pytest.raises(ValueError, match="identity='another', but this run has"):
    serve_alone(wanted)


def blocks(count: int, seed: int = 0):
  """Blocks of `FORMAT` in two parts, the first of two slices."""
  rng = np.random.default_rng(seed)
  made = []
  for _ in range(count):
    block_L2SKH = rng.standard_normal(FORMAT.block_shape).astype(np.float32)
    low, high = block_L2SKH[:3], block_L2SKH[3:]
    slices = (low[:, :, :, :1], jax.numpy.asarray(low[:, :, :, 1:]))
    parts = (Part(0, 3, slices), Part(3, 4, (high,)))
    made.append((rng.bytes(32), parts))
  return made


def whole(parts) -> np.ndarray:
  return np.concatenate([np.concatenate(p.slices, axis=3) for p in parts])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float8_e4m3fn'])
def test_blocks_come_back_bit_for_bit_in_their_order(tmp_path, dtype):
  kind = jax.numpy.dtype(dtype)
  written = [
    (
      key,
      tuple(
        p._replace(slices=tuple(np.asarray(s).astype(kind) for s in p.slices))
        for p in parts
      ),
    )
    for key, parts in blocks(5)
  ]
  wanted = replace(FORMAT, kv_dtype=dtype)
  save(str(tmp_path), {'prefill0': written, 'prefill1': []}, wanted)
  (found,) = load(str(tmp_path), wanted).values()
  assert [key for key, _ in found] == [key for key, _ in written]
  for (_, block), (_, parts) in zip(found, written):
    assert block.dtype == kind
    assert block.tobytes() == whole(parts).tobytes()
  assert load(str(tmp_path / 'nothing'), wanted) == {}


def test_a_kill_while_it_is_written_leaves_the_one_before(tmp_path):
  save(str(tmp_path), {'prefill0': blocks(3, seed=1)}, FORMAT)
  code = (
    'import test_warm_start as t; import sys\n'
    'more = t.blocks(20_000, seed=2)\n'
    'print("now", flush=True)\n'
    't.save(sys.argv[1], {"prefill0": more}, t.FORMAT)\n'
  )
  process = subprocess.Popen(
    [sys.executable, '-c', code, str(tmp_path)],
    env={**os.environ, 'PYTHONPATH': f'{ROOT}:{ROOT / "tests"}'},
    stdout=subprocess.PIPE,
  )
  assert process.stdout is not None and process.stdout.readline()
  deadline_s = time.monotonic() + 60
  while time.monotonic() < deadline_s and process.poll() is None:
    if any('1' in p.name for p in tmp_path.iterdir()):
      break
    time.sleep(0.001)
  process.send_signal(signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL
  process.stdout.close()
  (found,) = load(str(tmp_path), FORMAT).values()
  assert [key for key, _ in found] == [k for k, _ in blocks(3, seed=1)]
  save(str(tmp_path), {'prefill0': blocks(2, seed=3)}, FORMAT)
  assert len(load(str(tmp_path), FORMAT)['prefill0']) == 2


def test_snapshots_are_taken_meanwhile_and_when_a_run_is_preempted(tmp_path):
  at = SnapshotSpec(str(tmp_path / 'kept'), every_s=1e-3)
  often = replace(experiment(tmp_path), snapshot=at)
  serve_alone(often)
  steps = [int(p.name) for p in (tmp_path / 'kept').iterdir()]
  assert len(steps) == 1 and steps[0] >= 1  # the last of several
  again = replace(often, snapshot=SnapshotSpec(str(tmp_path / 'kept')))
  with pytest.raises(Preempted), began(again):
    raise Preempted
  assert [int(p.name) for p in (tmp_path / 'kept').iterdir()] == [steps[0] + 1]
  pools = load(at.path, pool_format(again, MODEL))
  assert sum(map(len, pools.values())) == 30


def test_a_simulation_takes_none():
  with pytest.raises(ValueError, match='Experiment.snapshot=.* needs'):
    tiny(backend='virtual', snapshot=SnapshotSpec('x'))

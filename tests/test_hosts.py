# SPDX-License-Identifier: Apache-2.0
"""Instances whose meshes span processes: the real script, run twice at once."""

import json
import os
from pathlib import Path
import signal
import socket
import subprocess

import pytest

from mooncake_jax.report.records import read_records
from scripts import run
from scripts.gin_source import ROOT

RUN = """
from __gin__ import dynamic_registration
import mooncake_jax.cluster_spec as cluster_spec
import mooncake_jax.model_config as model_config
import mooncake_jax.workload.scale as scale
import scripts.workloads as workloads
import mooncake_jax.conductor.spec as conductor
import scripts.experiment as experiment
include 'configs/model/small_random.gin'
include 'configs/hardware/cpu.gin'
include 'configs/cluster/cpu_1p1d.gin'
include 'configs/conductor/kvcache_centric.gin'
include 'configs/conductor/slo_cpu.gin'
experiment.Experiment.title = 'spanning'
experiment.Experiment.backend = 'device'
experiment.Experiment.workload = @workloads.TraceWorkload()
conductor.ConductorSpec.admission = 'none'
model_config.ModelConfig.num_layers = 2
cluster_spec.ClusterSpec.layers_per_transfer = 1
cluster_spec.ClusterSpec.streaming = 'layers'
cluster_spec.ClusterSpec.chunk_tokens = 64
cluster_spec.ClusterSpec.max_tokens = 512
cluster_spec.ClusterSpec.max_batch = 1
cluster_spec.ClusterSpec.page_tokens = 64
cluster_spec.ClusterSpec.tensor_parallel = 4
workloads.TraceWorkload.rows = @workloads.from_file()
workloads.TraceWorkload.scale = @scale.TraceScale()
scale.TraceScale.length_scale = 0.125
workloads.from_file.path = '{trace}'
"""
# Of 64 tokens here: the second and the third begin as the first does.
PROMPTS = [(0, [0, 1, 2]), (900, [0, 1, 3, 4]), (1800, [0, 1, 2, 5])]


def run_file(folder: Path) -> Path:
  rows = [
    {
      'timestamp': at_ms,
      'input_length': 512 * len(ids) - 40,
      'output_length': 48,
      'hash_ids': ids,
    }
    for at_ms, ids in PROMPTS
  ]
  trace = folder / 'trace.jsonl'
  trace.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  path = folder / 'spanning.gin'
  path.write_text(RUN.replace('{trace}', str(trace)))
  return path


def free_port() -> int:
  with socket.create_server(('127.0.0.1', 0)) as server:
    return server.getsockname()[1]


# Runs a step's tasks as SLURM numbers them.
SRUN = """#!/bin/sh
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
export SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2
for i in 0 1; do
  SLURM_PROCID=$i SLURM_LOCALID=$i "$@" &
  tasks="$tasks $!"
done
for task in $tasks; do wait $task || exit $?; done
"""


def test_two_processes_give_the_tokens_of_one(tmp_path):
  """Of 4 devices each, of which every instance has two; as a SLURM job."""
  config, out = str(run_file(tmp_path)), str(tmp_path / 'two')
  srun = tmp_path / 'bin/srun'
  srun.parent.mkdir()
  srun.write_text(SRUN)
  srun.chmod(0o755)
  job = {'SLURM_JOB_ID': '7', 'SLURM_SUBMIT_DIR': str(ROOT)}
  at = ['--coordinator', f'127.0.0.1:{free_port()}', '--num-processes', '2']
  process = subprocess.Popen(
    ['scripts/slurm/multihost.sbatch', config, *at, '--out', out],
    cwd=ROOT,
    env={
      **os.environ,
      **job,
      'PYTHONPATH': str(ROOT),
      'PATH': f'{srun.parent}:{os.environ["PATH"]}',
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )
  try:
    log = process.communicate(timeout=400)[0]
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)
  assert process.returncode == 0, log
  assert run.main([config, '--out', str(tmp_path / 'one')]) == 0
  one, two = (
    read_records(tmp_path / name / 'records.jsonl') for name in ('one', 'two')
  )
  assert [r.outcome for r in two] == ['completed'] * 3
  assert [r.output_tokens for r in two] == [r.output_tokens for r in one]
  assert all(len(r.output_tokens) == 6 for r in two)
  # What was computed before came out of host memory to both processes.
  assert [r.reused_tokens.get('local_host', 0) for r in two] == [0, 128, 128]
  found = json.loads((tmp_path / 'two/environment.json').read_text())
  assert len(found['devices']) == 8 and found['processes'] == 2


@pytest.mark.parametrize(
  'words, wanted',
  [
    (['--num-processes', '2'], '--process-id=None: give all three'),
    (['--multihost'], "Experiment.backend='virtual'"),
  ],
)
def test_what_is_missing_is_said_in_one_line(capsys, words, wanted):
  with pytest.raises(SystemExit) as ended:
    run.main(['configs/run/sim_conversation.gin', *words])
  assert ended.value.code == 2
  message = capsys.readouterr().err
  assert message.count('\n') == 1 and wanted in message

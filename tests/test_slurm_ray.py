# SPDX-License-Identifier: Apache-2.0
"""The SLURM script for a Ray cluster, run here with two nodes that are one."""

import importlib.util
import json
import os
from pathlib import Path
import shutil
import subprocess
import time

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
  ROOT / 'scripts/slurm/ray_cluster.sbatch',
  ROOT / 'scripts/slurm/ray_node.sh',
]
JOB = '4242'
# What SLURM would do on its nodes is noted and done here.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do
  [[ $1 == --nodelist=* ]] && node=${1#*=}
  shift
done
echo "$node $*" >> "$NOTES"
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
[[ "$1 $2 $3" == "show hostnames node-[a-b]" ]] && printf 'node-a\\nnode-b\\n'
"""


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
  subprocess.run(['bash', '-n', script], check=True)
  if shutil.which('shellcheck') is None:
    pytest.skip('shellcheck is not installed')
  subprocess.run(['shellcheck', '-S', 'warning', script], check=True)


def job(tmp_path: Path, *arguments: str, **variables: str):
  """The script, as a job of two nodes runs it."""
  tools = tmp_path / 'bin'
  tools.mkdir()
  for name, text in (('srun', SRUN), ('scontrol', SCONTROL)):
    (tools / name).write_text(text)
    (tools / name).chmod(0o755)
  environment = {
    **{k: v for k, v in os.environ.items() if not k.startswith('RAY_')},
    'PATH': f'{tools}:{os.environ["PATH"]}',
    'NOTES': f'{tmp_path / "notes"}',
    'TMPDIR': f'{tmp_path}',
    'SLURM_SUBMIT_DIR': f'{ROOT}',
    'SLURM_JOB_ID': JOB,
    'SLURM_JOB_NODELIST': 'node-[a-b]',
    'SLURM_CPUS_PER_TASK': '1',
    **variables,
  }
  return subprocess.run(
    [SCRIPTS[0], *arguments],
    env=environment,
    capture_output=True,
    text=True,
    timeout=200,
  )


@pytest.mark.skipif(
  importlib.util.find_spec('ray') is None or not (ROOT / '.venv').exists(),
  reason='the script runs what make setup has installed, with Ray',
)
def test_two_nodes_serve_and_nothing_is_left(tmp_path_factory):
  """Each has one CPU, so that each has one of the instances."""
  folder = tmp_path_factory.mktemp('r')  # Ray's sockets have short names
  done = job(
    folder,
    'configs/run/ray_simulated.gin',
    '--out',
    f'{folder / "out"}',
    MOONCAKE_INTERFACE='lo',
    MOONCAKE_RAY_PORT='26379',
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  assert 'Ray at 127.0.0.1:26379, 2 nodes' in done.stdout
  lines = (folder / 'out/records.jsonl').read_text().splitlines()
  outcomes = [json.loads(line)['outcome'] for line in lines]
  assert outcomes == ['completed'] * 4
  notes = (folder / 'notes').read_text().splitlines()
  assert [line.split()[0] for line in notes] == ['node-a', 'node-a', 'node-b']
  assert notes[2].endswith('worker 127.0.0.1:26379')
  until_s = time.monotonic() + 20
  while left := processes_of(folder):
    assert time.monotonic() < until_s, left
    time.sleep(0.2)


def processes_of(folder: Path) -> list[str]:
  """Command lines of processes that the job has started."""
  found = []
  for path in Path('/proc').glob('[0-9]*'):
    try:
      variables = (path / 'environ').read_bytes().split(b'\0')
      if f'TMPDIR={folder}'.encode() in variables:
        found.append((path / 'cmdline').read_text().replace('\0', ' '))
    except OSError:
      continue  # it has ended, or is another user's
  return [line for line in found if line]


def test_a_job_without_an_interface_ends_at_once(tmp_path):
  done = job(tmp_path, 'configs/run/ray_simulated.gin')
  assert done.returncode != 0 and 'names the interface' in done.stderr
  assert not (tmp_path / 'notes').exists()

# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed in the middle and go on."""

from dataclasses import replace
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import threading
import time

import pytest

from mooncake_jax.report.records import read_records
from mooncake_jax.report.unfinished import NAME
from mooncake_jax.report.unfinished import Unfinished
from mooncake_jax.request import RequestRecord
from scripts import resuming
from scripts import run
from scripts.chats import ChatWorkload
from scripts.gin_source import ROOT
from scripts.running import run as run_experiment
from tiny_experiment import CHATS
from tiny_experiment import tiny

COUNT = 18
SMALL = [
  'configs/run/disaggregated_small.gin',
  *(
    word
    for bind in (
      'ModelConfig.num_layers=2',
      'ClusterSpec.layers_per_transfer=2',
      'ClusterSpec.chunk_tokens=64',
      'ClusterSpec.max_batch=2',
      'distinct_prompts.num_tokens=100',
      'distinct_prompts.output_tokens=6',
      f'distinct_prompts.count={COUNT}',
      'distinct_prompts.interval_s=0.3',
    )
    for word in ('--bind', bind)
  ),
]


def num_kept(out: Path) -> int:
  path = out / NAME
  return path.read_text().count('"request_id"') if path.exists() else 0


def wait_for(out: Path, count: int) -> None:
  deadline_s = time.monotonic() + 120
  while num_kept(out) < count and time.monotonic() < deadline_s:
    time.sleep(0.01)
  assert num_kept(out) >= count


def killed(
  command: list[str], out: Path, number: int, at: int, path: str = ''
) -> int:
  """A script, ended by a signal once so many records are kept."""
  job = {'SLURM_JOB_ID': '7', 'SLURM_SUBMIT_DIR': str(ROOT)}
  process = subprocess.Popen(
    [*command, *SMALL, '--out', str(out)],
    cwd=ROOT,
    env={
      **os.environ,
      **job,
      'PYTHONPATH': str(ROOT),
      'PATH': f'{path}:{os.environ["PATH"]}',
    },
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  try:
    wait_for(out, at)
    process.send_signal(number)
    return process.wait(timeout=60)
  finally:
    process.kill()


def fake(folder: Path, name: str) -> str:
  """A command of SLURM's that notes how it was called; where it lies."""
  folder.mkdir()
  path = folder / name
  path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/called\n')
  path.chmod(0o755)
  return str(folder)


def test_a_run_killed_twice_goes_on_and_serves_nothing_again(tmp_path, capsys):
  out = tmp_path / 'killed'
  script = [sys.executable, 'scripts/run.py', '--resume']
  assert killed(script, out, signal.SIGKILL, 3) == -signal.SIGKILL
  first = num_kept(out)
  # As SLURM does it: the job is told, ends and asks to be queued again.
  job = ['bash', 'scripts/slurm/run.sbatch']
  path = fake(tmp_path / 'bin', 'scontrol')
  ended = killed(job, out, signal.SIGTERM, first + 3, path)
  assert ended == resuming.PREEMPTED == 143
  assert (tmp_path / 'bin/called').read_text() == 'requeue 7\n'
  with (out / NAME).open('a') as file:
    file.write('{"request_id": "torn')
  look = Unfinished(out, True, {'started': 'a look'})
  look.close()
  kept = look.records
  assert len(kept) >= first + 3
  assert run.main([*SMALL, '--out', str(out), '--resume']) == 0
  records = read_records(out / 'records.jsonl')
  assert not (out / NAME).exists()
  assert [r.outcome for r in records] == ['completed'] * COUNT
  by_name = {r.request_id: r for r in records}
  assert all(by_name[r.request_id] == r for r in kept)
  # The clock went on where the last kept record had ended.
  at_s = max(r.finished_s or 0.0 for r in kept)
  for r in records:
    if r not in kept:
      assert r.first_token_s is not None and r.first_token_s >= at_s
  found = json.loads((out / 'environment.json').read_text())
  parts = found['parts']
  assert found['resumed'] and [p['kept'] for p in parts][:2] == [0, first]
  assert parts[-1]['kept'] == len(kept) and parts[-1]['at_s'] == at_s
  assert parts[0]['slurm_job_id'] == '7' and parts[0]['commit']
  assert found['jax_backend'] == 'cpu'
  assert found['attention'][0] in ('cpu', 'jnp')  # what 'auto' was here
  assert found['matmul_precision'] == ['default']
  assert json.loads((out / 'summary.json').read_text())['offered'] == COUNT
  # Its tokens are those of a run that nobody killed.
  assert run.main([*SMALL, '--out', str(tmp_path / 'whole')]) == 0
  whole = read_records(tmp_path / 'whole/records.jsonl')
  assert [r.output_tokens for r in whole] == [r.output_tokens for r in records]
  assert not json.loads((tmp_path / 'whole/environment.json').read_text())[
    'resumed'
  ]
  capsys.readouterr()
  assert run.main([*SMALL, '--out', str(out), '--resume']) == 0
  assert capsys.readouterr().out == f'done already: {out}\n'


def test_another_config_is_refused_by_the_binding_that_differs(
  tmp_path, capsys
):
  sim = ['configs/run/sim_conversation.gin', '--out', str(tmp_path)]
  few = ['--bind', 'generate.conversation.num_requests=20']
  assert run.main([*sim, *few]) == 0
  other = ['--bind', 'ClusterSpec.chunk_tokens=1024', '--resume']
  with pytest.raises(SystemExit) as ended:
    run.main([*sim, *few, *other])
  assert ended.value.code == 1
  message = capsys.readouterr().err
  assert 'ClusterSpec.chunk_tokens was' in message and 'is 1024' in message


def test_a_killed_simulation_gives_the_records_of_a_whole_one(tmp_path):
  sim = ['configs/run/sim_conversation.gin', '--resume', '--out']
  more = ['--bind', 'generate.conversation.num_requests=200']
  out = tmp_path / 'killed'
  process = subprocess.Popen(
    [sys.executable, 'scripts/run.py', *sim, str(out), *more],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    stdout=subprocess.DEVNULL,
  )
  deadline_s = time.monotonic() + 60
  while not (out / NAME).exists() and time.monotonic() < deadline_s:
    time.sleep(0.01)
  process.kill()
  process.wait()
  assert (out / NAME).exists() and not (out / 'summary.json').exists()
  assert run.main([*sim, str(out), *more]) == 0
  assert run.main([*sim, str(tmp_path / 'whole'), *more]) == 0
  names = ('records.jsonl', 'events.jsonl', 'summary.json')
  for name in names:
    texts = [(tmp_path / f / name).read_text() for f in ('killed', 'whole')]
    assert texts[0] == texts[1]
  assert json.loads((out / 'environment.json').read_text())['resumed']


def test_a_chat_goes_on_with_the_answers_that_were_kept(tmp_path):
  """A closed loop: next turns are made of kept answers."""

  def end() -> None:
    wait_for(tmp_path, 3)
    os.kill(os.getpid(), signal.SIGTERM)

  # Slow enough to be ended in the middle.
  slow = [replace(session, gap_s=0.5) for session in CHATS.sessions]
  workload = ChatWorkload(replace(CHATS, sessions=slow), max_output_tokens=6)
  experiment = tiny(keeps_journal=False, workload=workload)
  with pytest.raises(resuming.Preempted), resuming.ends_on_sigterm():
    threading.Thread(target=end).start()
    run_experiment(experiment, '', tmp_path)
  kept = num_kept(tmp_path)
  assert 3 <= kept < 6
  resumed = run_experiment(experiment, '', tmp_path, resumes=True)
  whole = run_experiment(experiment, '', tmp_path / 'whole')
  tokens = [
    {r.request_id: r.output_tokens for r in outcomes['reuse'].records}
    for outcomes in (resumed, whole)
  ]
  assert tokens[0] == tokens[1] and len(tokens[0]) == 6


def test_records_of_another_workload_are_not_gone_on_with(tmp_path):
  kept = Unfinished(tmp_path, True, {})
  kept.keep(RequestRecord('nobody', 3, 0.0, outcome='completed'))
  kept.close()
  with pytest.raises(ValueError, match="request_id='nobody' was served"):
    run_experiment(tiny(), '', tmp_path, resumes=True)

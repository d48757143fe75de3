# SPDX-License-Identifier: Apache-2.0
"""Figures for TensorBoard and Weights & Biases, where they are installed."""

from importlib.util import find_spec
import json

import pytest

from mooncake_jax.metrics.table import flat
from mooncake_jax.report.tracking import PACKAGES
from mooncake_jax.report.tracking import TRACKERS
from scripts import run

SIM = [
  'configs/run/sim_conversation.gin',
  '--bind',
  'generate.conversation.num_requests=20',
]


@pytest.mark.parametrize('name', TRACKERS)
def test_what_is_not_installed_is_named_before_the_run(tmp_path, capsys, name):
  if find_spec(PACKAGES[name]) is not None:
    pytest.skip('it is installed')
  with pytest.raises(SystemExit) as ended:
    run.main([*SIM, '--out', str(tmp_path), '--track', name])
  message = capsys.readouterr().err
  assert ended.value.code == 1 and message.count('\n') == 1
  assert f'--track {name} needs {PACKAGES[name]}: pip install' in message
  assert not (tmp_path / 'summary.json').exists()


@pytest.mark.filterwarnings('ignore')
def test_tensorboard_reads_a_runs_figures(tmp_path):
  Event = pytest.importorskip('tensorboardX.proto.event_pb2').Event
  out = tmp_path / 'out'
  assert run.main([*SIM, '--out', str(out), '--track', 'tensorboard']) == 0
  (path,) = (out / 'tensorboard').iterdir()
  found: dict[str, list[tuple[int, float]]] = {}
  text = path.read_bytes()
  while text:  # TFRecords: length, its checksum, bytes, their checksum
    size = int.from_bytes(text[:8], 'little')
    event = Event.FromString(text[12 : 12 + size])
    text = text[16 + size :]
    for value in event.summary.value:
      point = event.step, value.simple_value
      found.setdefault(value.tag, []).append(point)
  assert [step for step, _ in found['request/ttft_s']] == [*range(1, 21)]
  figures = flat(json.loads((out / 'summary.json').read_text()))
  ((step, told),) = found['summary/ttft_s.p50']
  assert step == 20 and told == pytest.approx(figures['ttft_s.p50'])


@pytest.mark.filterwarnings('ignore')
def test_wandb_takes_a_run_offline(tmp_path, monkeypatch):
  pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  assert run.main([*SIM, '--out', str(tmp_path), '--track', 'wandb']) == 0
  (found,) = (tmp_path / 'wandb').glob('offline-run-*/run-*.wandb')
  assert b'request/ttft_s' in found.read_bytes()

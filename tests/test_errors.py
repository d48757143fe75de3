# SPDX-License-Identifier: Apache-2.0
"""What a user may do wrong ends a script in one line."""

from pathlib import Path
import socket
import subprocess
import sys

import pytest

from scripts import serve
from scripts.errors import one_line_errors

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import signal, sys
sys.path.insert(0, '.')
from scripts import serve
from scripts.errors import one_line_errors
with one_line_errors():
  {}
"""


def told(capsys, error: Exception) -> str:
  with pytest.raises(SystemExit) as ended, one_line_errors():
    raise error
  assert ended.value.code == 1
  return capsys.readouterr().err


def test_a_file_is_named_first_with_the_nearest(capsys, tmp_path):
  (tmp_path / 'results').mkdir()
  with pytest.raises(FileNotFoundError) as error:
    (tmp_path / 'result/records.jsonl').read_text()
  wanted = tmp_path / 'result/records.jsonl'
  nearest = str(tmp_path / 'results')
  assert told(capsys, error.value) == (
    f'error: {wanted}: no such file; nearest: {nearest!r}\n'
  )
  with pytest.raises(IsADirectoryError) as folder:
    tmp_path.read_text()
  assert told(capsys, folder.value) == f'error: {tmp_path}: is a directory\n'


def test_a_missing_extra_is_told_and_a_wrong_import_is_raised(capsys):
  assert 'pip install x' in told(capsys, ImportError('pip install x'))
  with pytest.raises(ImportError), one_line_errors():
    import scripts.there_is_no_such_module  # pyright: ignore  # noqa: F401


def test_a_port_is_tried_before_a_model_is_loaded(capsys):
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    for number, wanted in (
      (port, 'already in use; --port 0'),
      (70_000, '65535'),
    ):
      with pytest.raises(SystemExit) as ended:
        serve.main(['no_such.gin', '--port', str(number)])
      assert ended.value.code == 1 and wanted in capsys.readouterr().err


@pytest.mark.parametrize(
  'body, status, said',
  [
    ('signal.raise_signal(signal.SIGINT)', 130, 'interrupted\n'),
    ('[print(i) for i in range(100_000)]', 141, ''),
  ],
)
def test_ctrl_c_and_a_closed_pipe_leave_no_traceback(body, status, said):
  script = subprocess.Popen(
    [sys.executable, '-c', SCRIPT.format(body)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert script.stdout and script.stderr
  script.stdout.close()
  assert script.stderr.read() == said
  assert script.wait(60) == status
  script.stderr.close()

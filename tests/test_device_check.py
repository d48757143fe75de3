# SPDX-License-Identifier: Apache-2.0
"""The device check, small and on a CPU: all parts run, none ends the others."""

from pathlib import Path
import subprocess
import sys
import threading
from typing import Any

from scripts import device_check
from scripts.device_checks import selftest
from scripts.device_checks.part import Part
from scripts.device_checks.part import run_part
from scripts.device_checks.shapes import sizes

ROOT = Path(__file__).resolve().parents[1]


def test_every_part_runs():
  told = []
  found = device_check.check(sizes(is_small=True), 1800, told.append)
  parts = found['parts']
  assert not [part['error'] for part in parts.values() if 'error' in part]
  assert len(told) == len(parts) == 7
  assert parts['served']['reuse']['hit_rate'] > 0.4
  assert parts['served']['no_reuse']['hit_rate'] == 0
  assert parts['served']['same_tokens_share'] == 1
  assert parts['stages']['same_token'] and parts['stages']['num_stages'] == 2
  assert parts['kernels']['tiny.decode.pallas']['max_error'] < 1e-4
  assert 0 < parts['steps']['tiny.jnp']['decode.2x128']['copy_share']


def test_nothing_is_measured_after_a_failed_self_test(monkeypatch):
  monkeypatch.setattr(selftest, '_product', lambda: 1 / 0)
  found = device_check.check(sizes(is_small=True), 60, lambda found: None)
  assert list(found['parts']) == ['selftest']
  assert 'ZeroDivisionError' in found['parts']['selftest']['error']


def test_a_part_that_fails_or_hangs_is_reported():
  release = threading.Event()

  def fails(figures, budget):
    figures['before'] = 1
    raise RuntimeError('broken')

  failed = run_part(Part('a', fails, 60), 60)
  assert failed['before'] == 1 and 'broken' in failed['error']
  hangs: Any = lambda figures, budget: release.wait(30)  # noqa: E731
  hung = run_part(Part('b', hangs, 0.2), 60)
  release.set()
  assert not hung['ok'] and 'not over' in hung['error']


def test_it_needs_neither_gin_nor_grain():
  code = (
    'import sys\n'
    "for name in ('gin', 'grain', 'xxhash', 'matplotlib'):\n"
    '  sys.modules[name] = None  # importing it fails\n'
    'import scripts.device_check\n'
  )
  run = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert run.returncode == 0, run.stderr

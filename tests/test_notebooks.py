# SPDX-License-Identifier: Apache-2.0
"""Notebooks run from top to bottom and print what is committed."""

from pathlib import Path

from nbclient import NotebookClient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
# Those whose output is the same on any machine.
EXACT = ('conductor_by_hand',)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', EXACT)
def test_a_notebook_prints_what_is_committed(name):
  path = ROOT / 'notebooks' / f'{name}.ipynb'
  committed = nbformat.read(path, as_version=4)
  assert any(_printed(committed))
  fresh = nbformat.read(path, as_version=4)
  resources = {'metadata': {'path': str(ROOT)}}
  NotebookClient(fresh, timeout=120, resources=resources).execute()
  assert _printed(fresh) == _printed(committed)


def _printed(notebook) -> list[str]:
  """Text of all outputs, cell by cell."""
  texts = []
  for cell in notebook.cells:
    for output in cell.get('outputs', ()):
      data = output.get('data', {})
      texts.append(output.get('text') or data.get('text/plain', ''))
  return texts

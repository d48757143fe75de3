# SPDX-License-Identifier: Apache-2.0
"""Notebooks run from top to bottom, wherever they lie, as a reader's would."""

from pathlib import Path

from nbclient import NotebookClient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob('notebooks/*.ipynb'))
# Those whose output is the same on any machine.
EXACT = ('conductor_by_hand',)
# Those of a model that has to be there.
OF_SMOLLM2 = ('simulated_vs_measured',)
SMOLLM2 = ROOT / 'models/smollm2-135m'
CELL_S = 300


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_is_committed(path):
  if path.stem in OF_SMOLLM2 and not SMOLLM2.exists():
    pytest.skip(f'{SMOLLM2} is not there: make model')
  committed = nbformat.read(path, as_version=4)
  assert any(_printed(committed)), 'to be committed with its outputs'
  fresh = nbformat.read(path, as_version=4)
  resources = {'metadata': {'path': str(path.parent)}}
  NotebookClient(fresh, timeout=CELL_S, resources=resources).execute()
  assert _pictures(fresh) == _pictures(committed)
  if path.stem in EXACT:
    assert _printed(fresh) == _printed(committed)


def _printed(notebook) -> list[str]:
  """Text of all outputs, cell by cell."""
  texts = []
  for cell in notebook.cells:
    for output in cell.get('outputs', ()):
      data = output.get('data', {})
      texts.append(output.get('text') or data.get('text/plain', ''))
  return texts


def _pictures(notebook) -> int:
  """How many outputs are images."""
  return sum(
    'image/png' in output.get('data', {})
    for cell in notebook.cells
    for output in cell.get('outputs', ())
  )

# SPDX-License-Identifier: Apache-2.0
"""The floors of the house, held by one table (docs/architecture.md)."""

import ast
from collections.abc import Iterator
from graphlib import CycleError
from graphlib import TopologicalSorter
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400

# Room (folder or file of the package) -> floor. Imports go down or stay.
FLOORS = {
  'model_config': 1,
  'hf_config': 1,
  'request': 1,
  'slo': 1,
  'blocks': 1,
  'cluster_spec': 2,
  'events': 1,
  'backend': 2,
  'on_devices': 1,
  'costs': 2,
  'workload': 2,
  'metrics': 2,
  'model': 2,
  'conductor': 3,
  'store': 3,
  'instance': 3,
  'transfer': 3,
  'arrivals': 4,
  'changes': 4,
  'cluster': 4,
  'cluster_members': 4,
  'serve': 4,
  'sim': 4,
  'engine': 4,
  'systems': 4,
  'gateway': 5,
  'distributed': 5,
  'assess': 4,
  'report': 5,
}
JAX_ROOMS = {'model', 'transfer', 'engine', 'distributed'}
JAX_PACKAGES = {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'tensorstore'}
# Pairs on one floor that must not know each other.
STRANGERS = {
  ('conductor', 'instance'),
  ('instance', 'conductor'),
  ('engine', 'sim'),
  ('sim', 'engine'),
  ('cluster', 'sim'),
  ('cluster_members', 'sim'),
  ('cluster_members', 'engine'),
  ('cluster', 'engine'),
  ('serve', 'sim'),
  ('changes', 'sim'),
  ('serve', 'engine'),
}
OUTSIDE = {'scripts', 'gin', 'tests'}


def module_name(path: Path) -> str:
  parts = path.relative_to(ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


FILES = {module_name(p): p for p in sorted(ROOT.glob('mooncake_jax/**/*.py'))}


def imports(module: str) -> Iterator[str]:
  """Every imported module, also those imported inside functions."""
  for node in ast.walk(ast.parse(FILES[module].read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{module}: relative import'
      for alias in node.names:
        inner = f'{node.module}.{alias.name}'
        yield inner if inner in FILES else str(node.module)


def room(module: str) -> str | None:
  """'mooncake_jax.store.master' -> 'store'; None outside the package."""
  parts = module.split('.')
  return parts[1] if parts[0] == 'mooncake_jax' and len(parts) > 1 else None


def edges() -> Iterator[tuple[str, str, str, str]]:
  """(module, its room, imported module, its room) inside the package."""
  for module in FILES:
    for imported in imports(module):
      here, there = room(module), room(imported)
      if here and there:
        yield module, here, imported, there


def pure_modules() -> list[str]:
  return [m for m in FILES if room(m) not in JAX_ROOMS]


def test_every_room_stands_in_the_table():
  unknown = {room(m) for m in FILES} - set(FLOORS) - {None}
  assert not unknown, f'add to FLOORS and docs/architecture.md: {unknown}'


def test_imports_never_go_up():
  up = [f'{m} -> {i}' for m, a, i, b in edges() if FLOORS[b] > FLOORS[a]]
  assert not up


def test_strangers_stay_strangers():
  assert not [f'{m} -> {i}' for m, a, i, b in edges() if (a, b) in STRANGERS]


def test_pure_rooms_import_no_jax():
  bad = [
    f'{module} -> {imported}'
    for module in pure_modules()
    for imported in imports(module)
    if imported.split('.')[0] in JAX_PACKAGES or room(imported) in JAX_ROOMS
  ]
  assert not bad


def test_library_knows_neither_scripts_nor_gin():
  bad = [
    f'{module} -> {imported}'
    for module in FILES
    for imported in imports(module)
    if imported.split('.')[0] in OUTSIDE
  ]
  assert not bad


def test_no_circles():
  graph = {m: [i for i in imports(m) if i in FILES and i != m] for m in FILES}
  try:
    TopologicalSorter(graph).prepare()
  except CycleError as error:
    pytest.fail(' -> '.join(error.args[1]))


def test_no_file_is_too_long():
  lengths = {
    path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
    for folder in ('mooncake_jax', 'scripts', 'tests')
    for path in (ROOT / folder).glob('**/*.py')
  }
  assert not {p: n for p, n in lengths.items() if n > MAX_LINES}


def test_every_file_begins_with_its_licence_and_docstring():
  for module, path in FILES.items():
    text = path.read_text()
    if not text:  # an empty __init__.py
      continue
    assert text.startswith('# SPDX-License-Identifier: Apache-2.0\n'), module
    assert ast.get_docstring(ast.parse(text)), module


def test_importing_all_pure_modules_loads_no_jax():
  names = ', '.join(pure_modules())
  code = f'import sys, {names}; sys.exit("jax" in sys.modules)'
  run = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert run.returncode == 0, run.stderr or 'jax was imported'

# SPDX-License-Identifier: Apache-2.0
"""Writes the reference of the documentation from docstrings and configs.

  python scripts/reference.py [--out docs/reference]
  python scripts/reference.py NAME

With a NAME it tells the parameters of that name, or a class's, and writes none.
bindings.md has all that files in configs/ bind: every parameter with its type,
its default and what its docstring says; modules.md has each module's docstring
and its public names. Neither is kept: `make docs` writes them anew.
"""

import argparse
import ast
from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
from html import escape
import inspect
from pathlib import Path
import re
import sys
from typing import Any

from scripts import gin_source
from scripts.errors import one_line_errors
from scripts.gin_source import ROOT
from scripts.gin_types import parameters
from scripts.gin_types import shown

# 'name, other: what it is' under Attributes or Args of a docstring.
_ENTRY = re.compile(
  r'^ {2,4}((?:[a-z]\w*(?:, )?)+): (.*(?:\n {6,}\S.*)*)', re.M
)


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('--out', type=Path, default=ROOT / 'docs/reference')
  parser.add_argument('name', nargs='?', metavar='NAME')
  args = parser.parse_args(argv)
  with one_line_errors():
    if args.name:
      print('\n'.join(told(args.name, bound())))
      return 0
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / 'bindings.md').write_text(bindings_page(bound()))
    (args.out / 'modules.md').write_text(modules_page())
  print(args.out)
  return 0


def bound() -> dict[str, Callable[..., Any]]:
  """Every function and class that a file in configs/ binds, by full name."""
  found = {}
  for path in sorted((ROOT / 'configs').glob('**/*.gin')):
    source = gin_source.Source()
    gin_source.read(path, source)
    for binding in source.bindings:
      if binding.parameter:
        target = gin_source.resolve(binding.selector, binding.symbols)
        found[f'{target.__module__}.{target.__qualname__}'] = target
  return dict(sorted(found.items()))


def bindings_page(targets: dict[str, Callable[..., Any]]) -> str:
  """What can be bound, as markdown."""
  parts = [
    '# What configs bind',
    'Each parameter is bound as `module.Name.parameter = value` in a gin file, '
    "or by `--bind 'Name.parameter=value'`.",
  ]
  for name, target in targets.items():
    summary = inspect.getdoc(target) or ''
    parts.append(f'## `{name}`\n\n{escape(summary.split(chr(10))[0])}')
    parts.append(_parameters(target))
  return '\n\n'.join(parts) + '\n'


def told(name: str, targets: dict[str, Callable[..., Any]]) -> Iterator[str]:
  """What can be bound under a name, or of a class or function, as text.

  Args:
    name: 'chunk_tokens', 'ClusterSpec' or 'ClusterSpec.chunk_tokens'.

  Raises:
    ConfigError: there is nothing of that name.
  """
  known = set()
  found = False
  for target in targets.values():
    glosses, signature = _glosses(target), inspect.signature(target).parameters
    for parameter, hint in parameters(target).items():
      full = f'{target.__name__}.{parameter}'
      known |= {parameter, target.__name__, full}
      if name in (parameter, target.__name__, full):
        found = True
        default = _default(target, signature[parameter])
        yield f'{full}: {shown(hint)}{default and " = "}{default}'
        yield f'  {glosses.get(parameter, "")}'
  if not found:
    near = gin_source.nearest(name, sorted(known))
    raise gin_source.ConfigError(f'{name}: no config binds it{near}')


def _parameters(target: Callable[..., Any]) -> str:
  glosses = _glosses(target)
  lines = ['| parameter | type | default | |', '|---|---|---|---|']
  signature = inspect.signature(target).parameters
  for name, hint in parameters(target).items():
    cells = (
      f'`{name}`',
      f'<code>{_cell(shown(hint))}</code>',
      f'<code>{_cell(_default(target, signature[name]))}</code>',
      _cell(glosses.get(name, '')),
    )
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines)


def _default(target: Any, parameter: inspect.Parameter) -> str:
  if parameter.default is inspect.Parameter.empty:
    return ''
  if dataclasses.is_dataclass(target):
    for field in dataclasses.fields(target):
      made = field.default_factory
      if field.name == parameter.name and made is not dataclasses.MISSING:
        return repr(made())
  return repr(parameter.default)


def _glosses(target: Any) -> dict[str, str]:
  """By parameter, what the docstring says of it."""
  text = target.__doc__ or ''
  return {
    name: ' '.join(gloss.split())
    for names, gloss in _ENTRY.findall(text)
    for name in names.split(', ')
  }


def modules_page() -> str:
  """Every module of the library, as markdown."""
  parts = ['# Modules']
  for path in sorted((ROOT / 'mooncake_jax').glob('**/*.py')):
    tree = ast.parse(path.read_text())
    text = ast.get_docstring(tree)
    if text:
      name = path.relative_to(ROOT).as_posix()
      parts.append(f'## `{name}`\n\n<pre>{escape(text)}</pre>')
      parts.append('\n'.join(_public(tree)))
  return '\n\n'.join(parts) + '\n'


def _public(tree: ast.Module) -> Iterator[str]:
  for node in tree.body:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
      if not node.name.startswith('_'):
        first = (ast.get_docstring(node) or '').split('\n')[0]
        yield f'- `{node.name}`: {escape(first)}'


def _cell(text: str) -> str:
  """Safe inside a markdown table."""
  return escape(text).replace('|', '&#124;').replace('\n', ' ')


if __name__ == '__main__':
  sys.exit(main())

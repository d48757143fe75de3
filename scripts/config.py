# SPDX-License-Identifier: Apache-2.0
"""The one loader of gin files: builds a run's values, or says what is wrong.

A run file binds parameters of plain functions and frozen dataclasses, as in
t5x: `from __gin__ import dynamic_registration`, an import for each module it
names, `include` of other files by their path from the repository's root.
Building must be cheap: it makes values, and whoever gets them does the work.
Then it is known before the run what was bound but not used.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
import re
from typing import Any
from typing import TypeVar

import gin
from gin import config as gin_config

from scripts import gin_source
from scripts import gin_types
from scripts.gin_source import Binding
from scripts.gin_source import COMMAND_LINE
from scripts.gin_source import ConfigError
from scripts.gin_source import nearest
from scripts.gin_source import Reference
from scripts.gin_source import resolve
from scripts.gin_source import Source

__all__ = ['ConfigError', 'load']

T = TypeVar('T')
# Which script takes a file that binds these.
SCRIPTS = {'Assessment': 'scripts/assess.py', 'Sweep': 'scripts/sweep.py'}
# How Python tells that parameters without a default were not given.
_MISSING = re.compile(r'(\w+)(?:\.__init__)?\(\) missing \d+ \S+ .*?: (.*)')

# First, so that includes are found from any folder: elsewhere gin takes
# 'configs' for a package.
gin_config._LOCATION_PREFIXES.insert(0, str(gin_source.ROOT))


def load(
  path: str | Path, bindings: Sequence[str], root: Callable[..., T]
) -> tuple[T, str]:
  """Calls `root` with what a run file and extra bindings say.

  Args:
    path: a gin file, as given or from the repository's root.
    bindings: 'module.name.parameter = value', or without the module where one
      imported module has that name; these come last and win.
    root: a class or function that the file imports and binds.

  Returns:
    What `root` gave, and the operative config: every parameter that had a
    part in it, as a gin file that builds the same.

  Raises:
    ConfigError: one line with file, binding and nearest valid name.
  """
  source = Source()
  gin_source.read(path, source)
  extra = _command_line(bindings, source)
  gin_source.read_text(extra, COMMAND_LINE, source)
  _check(source.bindings)
  _check_script(source.bindings, root)
  gin.clear_config()
  gin.parse_config_file(str(gin_source.find(path).resolve()))
  gin.parse_config(extra)
  value = _build(root, str(path))
  _check_all_used(source.bindings)
  return value, gin.operative_config_str()


def _command_line(bindings: Sequence[str], source: Source) -> str:
  """The bindings as a gin file of their own, with the files' imports."""
  lines = [gin_source.HEADER, *source.imports.values()]
  return '\n'.join(lines + [_qualified(b, source) for b in bindings]) + '\n'


def _qualified(binding: str, source: Source) -> str:
  """Adds the module to 'Name.parameter = value' where one defines it."""
  name, equals, value = binding.partition('=')
  if not equals or '\n' in binding:
    raise ConfigError(f'{COMMAND_LINE} {binding!r}: must read X.y=value')
  scope, slash, selector = name.strip().rpartition('/')
  first, dot, _ = selector.partition('.')
  if dot and first not in source.symbols:
    known = _homes(source)
    if first not in known:
      hint = nearest(first, [*source.symbols, *known])
      raise ConfigError(f'{COMMAND_LINE}: {name.strip()}: no {first!r}{hint}')
    if len(known[first]) == 1:
      selector = f'{known[first][0]}.{selector}'
  return f'{scope}{slash}{selector} = {value.strip()}'


def _homes(source: Source) -> dict[str, list[str]]:
  """Imported modules by the public names that they define themselves."""
  found: dict[str, list[str]] = {}
  for home, module in source.symbols.items():
    for name in gin_source.public_names(module):
      defined_in = getattr(getattr(module, name), '__module__', '')
      if defined_in == getattr(module, '__name__', None):
        found.setdefault(name, []).append(home)
  return found


def _check_script(bindings: Sequence[Binding], root: Callable) -> None:
  """A sweep or an assessment is no run, though it includes one."""
  for binding in bindings:
    name = binding.selector.rpartition('.')[2]
    if name in SCRIPTS and name != root.__name__:
      raise binding.error(f'this is for {SCRIPTS[name]}')


def _check(bindings: Sequence[Binding]) -> None:
  """Names, parameters and types of all bindings, and no two in one file."""
  seen: dict[tuple, str] = {}
  macros = [b.selector for b in bindings if not b.parameter]
  for binding in bindings:
    _check_value(binding, macros)
    target = _check_target(binding) if binding.parameter else binding.selector
    key = (binding.file, binding.scope, target, binding.parameter)
    if key in seen:
      raise binding.error(f'already bound in {seen[key]}')
    seen[key] = binding.where


def _check_target(binding: Binding) -> Any:
  """The bound callable, once the parameter and the value's type fit it."""
  try:
    target = resolve(binding.selector, binding.symbols)
  except LookupError as error:
    raise binding.error(error.args[0]) from None
  if not callable(target):
    raise binding.error(f'{binding.selector} is neither function nor class')
  known = gin_types.parameters(target)
  if binding.parameter not in known:
    what = f'{binding.selector} has no parameter {binding.parameter!r}'
    raise binding.error(what + nearest(binding.parameter, [*known]))
  hint = known[binding.parameter]
  if not gin_types.fits(binding.value, hint, binding):
    value = repr(binding.value)
    raise binding.error(f'{value} is not of type {gin_types.shown(hint)}')
  return target


def _check_value(binding: Binding, macros: list[str]) -> None:
  """Whether all references and macros in a value exist."""
  for part in _leaves(binding.value):
    if isinstance(part, gin_source.Macro) and part.name not in macros:
      raise binding.error(f'no macro %{part.name}{nearest(part.name, macros)}')
    if isinstance(part, Reference):
      try:
        resolve(part.selector, binding.symbols)
      except LookupError as error:
        raise binding.error(f'@{part.name}: {error.args[0]}') from None


def _leaves(value: Any) -> Iterator[Any]:
  if isinstance(value, dict):
    value = [*value.keys(), *value.values()]
  if isinstance(value, list | tuple):
    for item in value:
      yield from _leaves(item)
  else:
    yield value


def _build(root: Callable[..., T], path: str) -> T:
  try:
    configured = gin.get_configurable(root)
  except (KeyError, ValueError):
    raise ConfigError(f'{path}: binds nothing of {root.__name__}') from None
  try:
    return configured()
  except (OSError, TypeError, ValueError) as error:
    raise ConfigError(f'{path}: {_told(error)}') from error


def _told(error: Exception) -> str:
  """The message without the call stack that gin appends to it."""
  line = str(error).strip().splitlines()[0]
  missing = _MISSING.match(line)
  if not isinstance(error, TypeError) or missing is None:
    return line
  names = missing[2].replace("'", '').replace(', and ', ' and ')
  where = sorted(
    {
      str(path.parent.relative_to(gin_source.ROOT))
      for path in (gin_source.ROOT / 'configs').glob('*/*.gin')
      if f'{missing[1]}.' in path.read_text()
    }
  )
  hint = f', or include a file of {where[0]}' if len(where) == 1 else ''
  return f'{missing[1]}: bind {names}{hint}'


def _check_all_used(bindings: Sequence[Binding]) -> None:
  """Every binding must have had a part in building the root."""
  later = _called_later(bindings)
  for binding in bindings:
    selector = _registered(binding)
    if selector not in later and not any(
      name == selector and binding.parameter in (*values, '')
      for (scope, name), values in gin_config._OPERATIVE_CONFIG.items()
      if f'{scope}/'.startswith(f'{_scope(binding)}/') or not _scope(binding)
    ):
      raise binding.error(
        f'bound, but nothing that is built uses it{_meant(binding, bindings)}'
      )


def _meant(binding: Binding, bindings: Sequence[Binding]) -> str:
  """Of a name without a dot: the parameter that is called so, or nearly."""
  if binding.parameter:
    return ''
  known = {b.parameter: b.name for b in bindings if b.parameter}
  close = nearest(binding.selector, known)
  for parameter, name in known.items():
    close = close.replace(f"'{parameter}'", f'{name!r}')
  return close


def _called_later(bindings: Sequence[Binding]) -> set[str]:
  """What `@name`, without parentheses, hands on to be called by the run."""
  return {
    _selector(resolve(part.selector, b.symbols))
    for b in bindings
    for part in _leaves(b.value)
    if isinstance(part, Reference) and not part.evaluate
  }


def _scope(binding: Binding) -> str:
  """gin keeps a macro's name as the scope of `gin.macro`."""
  if binding.parameter:
    return binding.scope
  return '/'.join(filter(None, (binding.scope, binding.selector)))


def _registered(binding: Binding) -> str:
  if not binding.parameter:
    return 'gin.macro'
  return _selector(resolve(binding.selector, binding.symbols))


def _selector(target: Any) -> str:
  """The full name under which gin registered a bound callable."""
  configurable = gin_config._inverse_lookup(target)
  assert configurable is not None, f'{target} was never registered'
  return configurable.selector

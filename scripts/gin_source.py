# SPDX-License-Identifier: Apache-2.0
"""Reads gin files into bindings that know their file, line and imports.

gin's own parser is used, with a delegate that keeps references as data, so
that every name can be looked up, with a good message, before gin acts on it.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
import difflib
import importlib
from pathlib import Path
import pkgutil
import re
import sys
from tokenize import TokenError
from typing import Any

from gin import config_parser

ROOT = Path(__file__).resolve().parents[1]
COMMAND_LINE = '--bind'
HEADER = 'from __gin__ import dynamic_registration'


class ConfigError(ValueError):
  """A mistake in a configuration, told in one line."""


@dataclass(frozen=True)
class Reference:
  """`@scope/module.name` (the callable) or `@scope/module.name()`."""

  name: str
  evaluate: bool

  def __repr__(self) -> str:
    return f'@{self.name}{"()" if self.evaluate else ""}'

  @property
  def selector(self) -> str:
    return self.name.rsplit('/', 1)[-1]


@dataclass(frozen=True)
class Macro:
  """`%NAME`."""

  name: str

  def __repr__(self) -> str:
    return f'%{self.name}'


@dataclass(frozen=True)
class Binding:
  """`scope/selector.parameter = value`, or `selector = value` (a macro)."""

  file: str
  line: int
  scope: str
  selector: str
  parameter: str
  value: Any
  symbols: Mapping[str, Any]

  @property
  def name(self) -> str:
    scope = f'{self.scope}/' if self.scope else ''
    parameter = f'.{self.parameter}' if self.parameter else ''
    return f'{scope}{self.selector}{parameter}'

  @property
  def where(self) -> str:
    return place(self.file, self.line)

  def error(self, what: str) -> ConfigError:
    return ConfigError(f'{self.where}: {self.name}: {what}')


@dataclass
class Source:
  """All that a run file and what it includes say.

  Attributes:
    bindings: in the order in which they take effect.
    imports: import statement by the name that it binds.
    symbols: the imported module by that name.
  """

  bindings: list[Binding] = field(default_factory=list)
  imports: dict[str, str] = field(default_factory=dict)
  symbols: dict[str, Any] = field(default_factory=dict)


def place(file: str, line: int) -> str:
  """'file:line'; the command line has no lines."""
  return file if file == COMMAND_LINE else f'{file}:{line}'


def nearest(name: str, options: Iterable[str]) -> str:
  """'; nearest: x' with the option like `name`, or nothing if none is."""
  folded = {option.casefold(): option for option in options}
  close = difflib.get_close_matches(name.casefold(), folded, 1, 0.5)
  return f'; nearest: {folded[close[0]]!r}' if close else ''


def public_names(thing: Any) -> list[str]:
  return [name for name in dir(thing) if not name.startswith('_')]


def resolve(selector: str, symbols: Mapping[str, Any]) -> Any:
  """The object that `module.name` stands for; LookupError says why none."""
  first, *rest = selector.split('.')
  if first not in symbols:
    raise LookupError(f'{first!r} is not imported{nearest(first, [*symbols])}')
  thing = symbols[first]
  for name in rest:
    if not hasattr(thing, name):
      raise LookupError(
        f'{first} has no {name!r}{nearest(name, public_names(thing))}'
      )
    thing = getattr(thing, name)
  return thing


class _AsData(config_parser.ParserDelegate):
  def configurable_reference(self, scoped_configurable_name, evaluate):
    return Reference(scoped_configurable_name, evaluate)

  def macro(self, macro_name):
    return Macro(macro_name)


def _import(
  where: str, statement: config_parser.ImportStatement, stack: tuple[Path, ...]
) -> Any:
  """The module that the statement binds a name to.

  It may lie beside a file of `stack`, or where the user is. These come last:
  no file there stands in for one that is installed.
  """
  folders = [str(path.resolve().parent) for path in reversed(stack)]
  for folder in (*folders, str(Path.cwd())):
    if folder not in sys.path:
      sys.path.append(folder)
  try:
    module = importlib.import_module(statement.module)
  except ModuleNotFoundError as error:
    if not statement.module.startswith(str(error.name)):
      raise
    hint = _nearest_module(statement.module)
    raise ConfigError(
      f'{where}: no module {statement.module!r}{hint}'
    ) from None
  if statement.alias or statement.is_from:
    return module
  return importlib.import_module(statement.module.split('.')[0])


def _nearest_module(name: str) -> str:
  parent, _, last = name.rpartition('.')
  try:
    path = importlib.import_module(parent).__path__
  except (ImportError, ValueError, AttributeError):
    return ''
  close = nearest(last, [module.name for module in pkgutil.iter_modules(path)])
  return close.replace("'", f"'{parent}.", 1)


def find(path: str | Path) -> Path:
  """Where a config lies: as given, or under the repository's root."""
  for candidate in (Path(path), ROOT / path):
    if candidate.is_file():
      return candidate
  raise ConfigError(f'{path}: no such file{_nearest_config(Path(path))}')


def _nearest_config(path: Path) -> str:
  """Of the same name in `configs`, or like it in the folder that is meant."""
  own = [each.name for each in (ROOT / path).parent.glob('*.gin')]
  if close := path.suffix and nearest(path.name, own):
    return close
  known = sorted((ROOT / 'configs').glob('**/*.gin'))
  found = [each for each in known if each.stem == path.stem]
  if found:
    return f'; nearest: {str(found[0].relative_to(ROOT))!r}'
  return nearest(str(path), (str(each.relative_to(ROOT)) for each in known))


def statements(text: str, name: str) -> Iterator[Any]:
  """What a gin file says; references and macros stay data.

  Raises:
    ConfigError: it does not read as gin.
  """
  parser = config_parser.ConfigParser(text, _AsData())
  try:
    yield from parser
  except (SyntaxError, TokenError, ValueError) as error:
    if isinstance(error, ConfigError):
      raise
    raise ConfigError(_what_is_wrong(error, name)) from None


def _what_is_wrong(error: Exception, name: str) -> str:
  """gin tells a word without quotes as a node of Python's syntax tree."""
  word = re.search(r"Failed to parse token '([A-Za-z_]\w*)'", str(error))
  if word and isinstance(error, SyntaxError):
    where, said = place(name, error.lineno or 0), (error.text or '').strip()
    return f"{where}: {said}: text needs quotes: '{word[1]}'"
  return f'{name}: {str(error).strip().splitlines()[0]}'


def read(path: str | Path, source: Source, stack: tuple[Path, ...] = ()):
  """Appends what a file and its includes say to `source`."""
  found = find(path)
  if found in stack:
    raise ConfigError(f'{path}: includes itself')
  read_text(found.read_text(), str(path), source, (*stack, found))


def binds(path: str | Path, target: Any) -> bool:
  """Whether a file, or one that it includes, binds a parameter of `target`."""
  source = Source()
  read(path, source)
  for binding in source.bindings:
    try:
      if binding.parameter and (
        resolve(binding.selector, binding.symbols) is target
      ):
        return True
    except LookupError:
      pass  # whoever loads the file says what is wrong with the name
  return False


def read_text(
  text: str, name: str, source: Source, stack: tuple[Path, ...] = ()
) -> None:
  """Appends what `text` says to `source`; `name` stands in messages."""
  symbols: dict[str, Any] = {}
  begun = False
  for statement in statements(text, name):
    line = statement.location.line_num
    where = place(name, line)
    match statement:
      case config_parser.IncludeStatement():
        _include(where, statement.filename, source, stack)
        continue
      case config_parser.ImportStatement() if _is_header(statement):
        begun = True
      case config_parser.ImportStatement():
        bound = statement.bound_name()
        symbols[bound] = _import(where, statement, stack)
        source.imports[bound] = statement.format()
      case config_parser.BindingStatement():
        scope, selector, parameter, value, _ = statement
        source.bindings.append(
          Binding(name, line, scope, selector, parameter or '', value, symbols)
        )
    if not begun:
      raise ConfigError(f'{where}: must come after {HEADER!r}')
  source.symbols.update(symbols)


def _is_header(statement: config_parser.ImportStatement) -> bool:
  return statement.module == '__gin__.dynamic_registration'


def _include(
  where: str, filename: str, source: Source, stack: tuple[Path, ...]
) -> None:
  try:
    find(filename)
  except ConfigError as error:
    raise ConfigError(f'{where}: include {error}') from None
  read(filename, source, stack)

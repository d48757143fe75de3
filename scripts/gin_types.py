# SPDX-License-Identifier: Apache-2.0
"""Whether a bound value fits the annotation of the parameter it is bound to.

gin checks neither. An int fits a float; nothing else is converted. What can't
be known before a reference is called is left to the call.
"""

import collections.abc
from collections.abc import Mapping
import functools
import inspect
import types
import typing
from typing import Any
from typing import get_args
from typing import get_origin

from scripts.gin_source import Binding
from scripts.gin_source import Macro
from scripts.gin_source import Reference
from scripts.gin_source import resolve

_SEQUENCES = (list, set, frozenset, collections.abc.Sequence)
_MAPPINGS = (dict, collections.abc.Mapping)


@functools.cache
def parameters(target: Any) -> Mapping[str, Any]:
  """Annotation by parameter name; Any where there is none."""
  call = target.__init__ if inspect.isclass(target) else target
  hints = typing.get_type_hints(call)
  return {
    name: hints.get(name, Any)
    for name, parameter in inspect.signature(target).parameters.items()
    if parameter.kind is not inspect.Parameter.VAR_POSITIONAL
  }


def fits(value: Any, hint: Any, binding: Binding) -> bool:
  """Whether `value`, as written in the file of `binding`, is a `hint`."""
  if hint is Any or isinstance(value, Macro):
    return True
  if isinstance(value, Reference):
    return _reference_fits(value, hint, binding)
  origin, args = get_origin(hint), get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return any(fits(value, arg, binding) for arg in args)
  if origin is typing.Literal:
    return any(value == arg and type(value) is type(arg) for arg in args)
  if origin is tuple:
    return _tuple_fits(value, args, binding)
  if origin in _SEQUENCES:
    return isinstance(value, list | tuple) and all(
      fits(item, args[0], binding) for item in value
    )
  if origin in _MAPPINGS:
    return isinstance(value, dict) and all(
      fits(k, args[0], binding) and fits(v, args[1], binding)
      for k, v in value.items()
    )
  return _plain_fits(value, origin or hint)


def _plain_fits(value: Any, hint: Any) -> bool:
  if hint is None or hint is type(None):
    return value is None
  if hint is float:
    return isinstance(value, int | float) and not isinstance(value, bool)
  if hint is int:
    return isinstance(value, int) and not isinstance(value, bool)
  if inspect.isclass(hint) and not getattr(hint, '_is_protocol', False):
    return isinstance(value, hint)
  return True


def _tuple_fits(value: Any, args: tuple, binding: Binding) -> bool:
  if not isinstance(value, tuple):
    return False
  if len(args) == 2 and args[1] is Ellipsis:
    args = (args[0],) * len(value)
  return len(args) == len(value) and all(
    fits(item, arg, binding) for item, arg in zip(value, args, strict=True)
  )


def _reference_fits(value: Reference, hint: Any, binding: Binding) -> bool:
  target = resolve(value.selector, binding.symbols)
  options = _options(hint)
  if not value.evaluate:
    return not all(option in _LITERALS for option in options)
  result = _result(target)
  return any(
    not (inspect.isclass(option) and inspect.isclass(result))
    or getattr(option, '_is_protocol', False)
    or issubclass(result, option)
    or (option is float and result is int)
    for option in options
  )


_LITERALS = (int, float, str, bool, bytes, type(None))


def _options(hint: Any) -> tuple[Any, ...]:
  """The classes a union allows, generics without their arguments."""
  if get_origin(hint) in (typing.Union, types.UnionType):
    return tuple(o for arg in get_args(hint) for o in _options(arg))
  return (get_origin(hint) or hint,)


def _result(target: Any) -> Any:
  """What calling `target` gives, as far as its annotation tells."""
  if inspect.isclass(target):
    return target
  hint = typing.get_type_hints(target).get('return', Any)
  return get_origin(hint) or hint


def shown(hint: Any) -> str:
  """'int | None', without module names."""
  if inspect.isclass(hint) and not get_args(hint):
    return hint.__name__
  return str(hint).replace('typing.', '')

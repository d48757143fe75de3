# SPDX-License-Identifier: Apache-2.0
"""A user's mistake ends a script with one line, not with a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
import os
from pathlib import Path
import signal
import sys

from scripts.gin_source import ConfigError
from scripts.gin_source import nearest

TRACEBACK = 'MOONCAKE_JAX_TRACEBACK'


@contextmanager
def one_line_errors() -> Iterator[None]:
  """Exits with 2 for a wrong config, 1 for other wrong input.

  Ctrl-C and a reader that goes away, as `head` does, end it as they end other
  programs. Set MOONCAKE_JAX_TRACEBACK=1 to see where it was raised.
  """
  try:
    yield
    sys.stdout.flush()
  except BrokenPipeError:
    # What is still buffered must not be tried again when Python ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)
  except KeyboardInterrupt:
    if os.environ.get(TRACEBACK):
      raise
    print('interrupted', file=sys.stderr)
    sys.exit(128 + signal.SIGINT)
  except (ValueError, OSError, ImportError) as error:
    if os.environ.get(TRACEBACK) or _is_a_bug(error):
      raise
    print(f'error: {_told(error)}', file=sys.stderr)
    sys.exit(2 if isinstance(error, ConfigError) else 1)


def _is_a_bug(error: Exception) -> bool:
  """Python names what it could not import; a missing extra is told without."""
  return isinstance(error, ImportError) and error.name is not None


def _told(error: Exception) -> str:
  """Of a file: its name first, and the nearest one that is there."""
  if not isinstance(error, OSError) or not isinstance(error.filename, str):
    return str(error)
  path = missing = Path(error.filename)
  if not isinstance(error, FileNotFoundError):
    return f'{path}: {(error.strerror or str(error)).lower()}'
  while not missing.parent.exists():
    missing = missing.parent
  beside = map(str, missing.parent.glob('*'))
  return f'{path}: no such file{nearest(str(missing), beside)}'

# SPDX-License-Identifier: Apache-2.0
"""A user's mistake ends a script with one line, not with a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
import os
import sys

from scripts.gin_source import ConfigError

TRACEBACK = 'MOONCAKE_JAX_TRACEBACK'


@contextmanager
def one_line_errors() -> Iterator[None]:
  """Exits with 2 for a wrong config, 1 for other wrong input.

  Set MOONCAKE_JAX_TRACEBACK=1 to see where it was raised.
  """
  try:
    yield
  except (ValueError, OSError) as error:
    if os.environ.get(TRACEBACK):
      raise
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2 if isinstance(error, ConfigError) else 1)

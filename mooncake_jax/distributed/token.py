# SPDX-License-Identifier: Apache-2.0
"""Ray's token: who knows it may join, call and run code; nobody else may.

Ray reads its environment when it is imported, so this comes before that.
"""

import os
import secrets
import sys

MODE = 'RAY_AUTH_MODE'


def require_token() -> None:
  """Has Ray ask for a token, a new one where the environment has none.

  Where the environment says how Ray is to authenticate, that stays.

  Raises:
    RuntimeError: Ray was imported before, without.
  """
  if MODE in os.environ:
    return
  if 'ray' in sys.modules:
    raise RuntimeError(f'require_token() or {MODE} comes before `import ray`')
  os.environ[MODE] = 'token'
  os.environ.setdefault('RAY_AUTH_TOKEN', secrets.token_hex(32))


def check_token() -> None:
  """Raises RuntimeError if nobody said how Ray is to authenticate."""
  if MODE not in os.environ:
    raise RuntimeError(f'call require_token(), or set {MODE}, before Ray')

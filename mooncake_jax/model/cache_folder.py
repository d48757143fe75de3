# SPDX-License-Identifier: Apache-2.0
"""Where this machine keeps what it would else work out again."""

import os
from pathlib import Path


def cache_folder() -> Path:
  """`$XDG_CACHE_HOME/mooncake_jax` (~/.cache/mooncake_jax); may not exist."""
  base = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
  return Path(base) / 'mooncake_jax'

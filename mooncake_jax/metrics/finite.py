# SPDX-License-Identifier: Apache-2.0
"""Values that any reader of JSON takes."""

import math
from typing import Any


def finite(value: Any) -> Any:
  """JSON knows no infinity."""
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, dict):
    return {key: finite(each) for key, each in value.items()}
  if isinstance(value, list | tuple):
    return [finite(each) for each in value]
  return value

# SPDX-License-Identifier: Apache-2.0
"""What the Conductor would have the cluster do besides serving: values.

`Conductor.advise` returns them; whoever runs the loop carries them out, or not.
"""

from dataclasses import dataclass
from typing import Literal

from mooncake_jax.request import BlockKey


@dataclass(frozen=True)
class Replicate:
  """Copy these leading blocks of a prompt to another instance's segment.

  `source` is an instance, that has them on whatever medium.
  """

  keys: tuple[BlockKey, ...]
  source: str
  target: str


@dataclass(frozen=True)
class DropCopies:
  """These copies were made ahead and are no longer worth their room."""

  keys: tuple[BlockKey, ...]
  instance: str


@dataclass(frozen=True)
class SetRole:
  """Drain an instance and let it take the other role, 'prefill' or 'decode'."""

  instance: str
  role: Literal['prefill', 'decode']


Advice = Replicate | DropCopies | SetRole

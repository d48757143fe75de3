# SPDX-License-Identifier: Apache-2.0
"""The papers' workloads by name: published where they are, else generated."""

from functools import lru_cache
from typing import get_args
from typing import Literal

from mooncake_jax.workload.generate import tool_agent
from scripts.workloads import published
from scripts.workloads import Rows

Name = Literal['conversation', 'tool_agent', 'synthetic']
NAMES: tuple[Name, ...] = get_args(Name)
# As many as in FAST'25 table 2.
TOOL_AGENT_REQUESTS = 23_608


@lru_cache(maxsize=4)
def _rows(name: Name) -> Rows:
  if name == 'tool_agent':
    return Rows(tool_agent(TOOL_AGENT_REQUESTS), [])
  return published(f'{name}_trace.jsonl')


def paper_rows(name: Name) -> Rows:
  """A workload of FAST'25 table 2, whole.

  The tool & agent trace is not public here: its rows come from the generator
  that was fitted to its statistics (`workload/shapes.py`).

  Raises:
    ValueError: there is no such workload, or no folder of traces.
  """
  if name not in NAMES:
    raise ValueError(f'paper_rows: {name=} is not one of {", ".join(NAMES)}')
  return _rows(name)

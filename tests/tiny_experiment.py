# SPDX-License-Identifier: Apache-2.0
"""An experiment small enough to run on devices in a test."""

from lifecycle import COSTS
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.slo import SLO
from mooncake_jax.workload.session_file import Session
from scripts.chats import Chats
from scripts.chats import ChatWorkload
from scripts.experiment import Experiment
from scripts.models import Model

CHATS = Chats(
  [
    Session(f's{i}', ('a b c d e f g h', 'i j k', 'l m'), gap_s=0.01)
    for i in range(2)
  ],
  errors=['chats.jsonl:3: not JSON'],
)


def tiny(**changes) -> Experiment:
  """Two chats of three turns on 2 prefill and 2 decode instances."""
  return Experiment(
    **{
      'title': 'tiny',
      'model': Model(config=MODEL),
      'cluster': SPEC,
      'conductor': ConductorSpec(admission='none'),
      'slo': SLO(),
      'costs': COSTS,
      'workload': ChatWorkload(CHATS, max_output_tokens=6),
      'backend': 'device',
      **changes,
    }
  )

# SPDX-License-Identifier: Apache-2.0
"""What is asked of a cluster whose processes are killed, and who kills them.

Requests come evenly, about texts that come again, so that a dip of what is
served is the kills' and each text's answer can be known beforehand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
import os
import random
import signal
from typing import TYPE_CHECKING

import numpy as np

from mooncake_jax.arrivals import Agenda
from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.changes import Changes
from mooncake_jax.cluster import Cluster
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.events import TokensEmitted
from mooncake_jax.request import Request
from mooncake_jax.request import Sampling
from mooncake_jax.serve import serve

if TYPE_CHECKING:
  from mooncake_jax.distributed.backend import RayBackend

GAP = 1e-3  # of the two likeliest tokens' log probabilities: below is a tie


@dataclass(frozen=True)
class Kill:
  """An instance's process gets a SIGKILL."""

  time_s: float
  instance: str


class Killer:
  """Kills one that is there when it happens; an `arrivals.Command`."""

  def __init__(self, backend: 'RayBackend', seed: int):
    self._backend = backend
    self._rng = random.Random(seed)
    self.kills: list[Kill] = []

  def happen(self, cluster: Cluster) -> None:
    """See `Command`."""
    there = sorted(self._backend.crew.process_ids.items())
    if there:
      name, process_id = self._rng.choice(there)
      os.kill(process_id, signal.SIGKILL)
      self.kills.append(Kill(self._backend.now_s(), name))


class Plan(Agenda):
  """Requests, cancels and kills."""

  def __init__(
    self,
    requests: Sequence[Request],
    changes: Changes,
    killer: Killer,
    kill_times_s: Sequence[float],
  ):
    super().__init__(requests, changes)
    for at_s in kill_times_s:
      self._push(at_s, killer)


def texts(
  count: int, vocab_size: int, block_tokens: int, seed: int
) -> list[Request]:
  """Requests whose prompts begin in a few ways and go on in many."""
  rng = np.random.default_rng(seed)
  heads = [rng.integers(2, vocab_size, 96) for _ in range(8)]
  made = []
  for number in range(count):
    head = heads[rng.integers(len(heads))][: rng.choice((0, 48, 96))]
    tail = rng.integers(2, vocab_size, rng.integers(8, 64))
    prompt = np.concatenate([head, tail]).astype(np.int32)
    keys = prefix_keys(prompt, block_tokens)
    output = int(rng.choice((16, 64, 96)))
    made.append(Request(f'{number}', 0.0, len(prompt), output, keys, prompt))
  return made


def asked(
  texts: Sequence[Request], seconds: float, per_s: float, seed: int
) -> list[Request]:
  """So many a second, evenly; named 'NUMBER.TEXT'."""
  rng = random.Random(seed)
  return [
    replace(text, request_id=f'{i}.{text.request_id}', arrival_s=i / per_s)
    for i in range(round(seconds * per_s))
    if (text := rng.choice(texts))
  ]


def answers(
  texts: Sequence[Request], conductor: Conductor, cluster: Cluster
) -> dict[str, tuple[int, ...]]:
  """What texts get on this cluster, by their names.

  Those lack in whose answer two tokens are as likely: either would be right.
  """
  ties: set[str] = set()

  def hear(event: object) -> None:
    if isinstance(event, TokensEmitted):
      for row in event.emitted.rows:
        for first, second in (each.top for each in row.logprobs):
          if first[1] - second[1] < GAP:
            ties.add(row.request_id)

  sampling = Sampling(logprobs=2)
  plain = [replace(text, sampling=sampling) for text in texts]
  records, _ = serve(plain, conductor, cluster, on_event=hear)
  return {
    r.request_id: tuple(r.output_tokens)
    for r in records
    if r.request_id not in ties
  }

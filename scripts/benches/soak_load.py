# SPDX-License-Identifier: Apache-2.0
"""What a soak does to a cluster: clients that never stop, and trouble.

Clients ask in a closed loop, so a slow machine is as busy as a fast one. They
go on with a chat or begin one about a text that others ask about too; prompts
are short and long, tokens are drawn in all ways. Trouble cancels requests,
loses and drains instances and memory, and has instances join again.
"""

from collections import Counter
from collections.abc import Callable
import random

import numpy as np

from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.cluster import Cluster
from mooncake_jax.events import ENDS
from mooncake_jax.events import Event
from mooncake_jax.events import InstanceLost
from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import Sampling

OUTPUTS = (1, 4, 12, 40, 80)
SAMPLINGS = (
  Sampling(),
  Sampling(),
  Sampling(0.8, top_k=20, logprobs=3),
  Sampling(1.0, top_p=0.9, min_p=0.02),
)
CANCEL_EVERY_S, TROUBLE_EVERY_S, GONE_S = 0.4, 2.0, 1.0


class Clients:
  """Some clients, each with one request under way."""

  def __init__(self, cluster: Cluster, vocab_size: int, count: int, seed: int):
    self._cluster = cluster
    self._vocab_size = vocab_size
    self._rng = random.Random(seed)
    self._draw = np.random.default_rng(seed)
    most = cluster.max_tokens
    self._texts = [self._tokens(most // 3) for _ in range(8)]
    self._chats: list[np.ndarray] = [self._texts[0]] * count
    self._client_of: dict[str, int] = {}
    self._num_asked = 0
    self.until_s = 0.0

  @property
  def asked(self) -> int:
    """Requests so far."""
    return self._num_asked

  @property
  def under_way(self) -> list[str]:
    return [*self._client_of]

  def initial(self) -> list[Request]:
    """One of each client, now."""
    self._client_of.clear()
    return [self._ask(client) for client in range(len(self._chats))]

  def follow_up(self, record: RequestRecord) -> Request | None:
    """The client's next request, until time is up; see `serve.FollowUp`."""
    client = self._client_of.pop(record.request_id)
    answer = np.array(record.output_tokens, np.int32)
    self._chats[client] = np.concatenate([self._chats[client], answer])
    if self._cluster.backend.now_s() >= self.until_s:
      return None
    return self._ask(client)

  def _ask(self, client: int) -> Request:
    output = self._rng.choice(OUTPUTS)
    most = self._cluster.max_tokens - output
    prompt = self._chats[client]
    if len(prompt) + 2 > most or self._rng.random() < 0.4:
      prompt = self._rng.choice(self._texts)
      prompt = prompt[: self._rng.choice((0, 5, len(prompt)))]
    new = self._rng.choice((1, 3, 20, most))
    prompt = np.concatenate([prompt, self._tokens(new)])[:most]
    self._chats[client] = prompt
    name = f'c{client}.{self._num_asked}'
    self._num_asked += 1
    self._client_of[name] = client
    stops = (self._rng.randrange(self._vocab_size),)
    return Request(
      name,
      self._cluster.backend.now_s(),
      len(prompt),
      output,
      prefix_keys(prompt, self._cluster.spec.block_size_tokens),
      prompt,
      self._rng.choice(SAMPLINGS),
      stops if self._rng.random() < 0.3 else (),
    )

  def _tokens(self, count: int) -> np.ndarray:
    drawn = self._draw.integers(0, self._vocab_size, count)
    return drawn.astype(np.int32)


class Trouble:
  """Breaks things while events come, and counts how requests end."""

  def __init__(self, cluster: Cluster, clients: Clients, seed: int):
    self._cluster = cluster
    self._clients = clients
    self._rng = random.Random(seed)
    self._cancel_s = self._trouble_s = cluster.backend.now_s()
    self._back_s: dict[str, float] = {}
    self._leaving: set[str] = set()
    self.done: Counter[str] = Counter()
    self.ends: Counter[tuple[str, int]] = Counter()

  def on_event(self, event: Event) -> None:
    """See `serve`."""
    now_s = self._cluster.backend.now_s()
    if isinstance(event, ENDS):
      self.ends[event.request_id, event.attempt] += 1
    if isinstance(event, InstanceLost):
      self._leaving.discard(event.instance)
      self._back_s[event.instance] = now_s + GONE_S
    self._bring_back(now_s)
    if now_s >= self._cancel_s:
      self._cancel_s = now_s + CANCEL_EVERY_S
      self._cancel()
    if now_s >= self._trouble_s:
      self._trouble_s = now_s + TROUBLE_EVERY_S
      self._rng.choice((self._lose, self._lose, self._drain, self._forget))()

  def repair(self, hear: Callable[[Event], None]) -> None:
    """Lets all that leave be gone, and brings all back."""
    while self._leaving:
      for event in self._cluster.step(self._cluster.backend.now_s() + 1.0):
        hear(event)
        if isinstance(event, InstanceLost):
          self._leaving.discard(event.instance)
          self._back_s[event.instance] = 0.0
    self._bring_back(np.inf)  # which is told as the cluster settles

  def _bring_back(self, now_s: float) -> None:
    for name, back_s in [*self._back_s.items()]:
      if now_s >= back_s:
        del self._back_s[name]
        self._cluster.join(name)
        self.done['joined'] += 1

  def _cancel(self) -> None:
    if names := self._clients.under_way:
      self._cluster.cancel(self._rng.choice(names))
      self.done['cancels'] += 1

  def _lose(self) -> None:
    if name := self._dispensable():
      self._cluster.lose(name)
      self._back_s[name] = self._cluster.backend.now_s() + GONE_S
      self.done['lost'] += 1

  def _drain(self) -> None:
    if name := self._dispensable():
      self._leaving.add(name)
      self._cluster.drain(name)
      self.done['drained'] += 1

  def _forget(self) -> None:
    """A prefill instance's host memory or SSD is wiped."""
    segments = [
      s for s in self._cluster.master.segments() if not s.endswith('/device')
    ]
    if segments:
      self._cluster.lose_segment(self._rng.choice(segments))
      self.done['wiped'] += 1

  def _dispensable(self) -> str | None:
    """An instance without which its role goes on."""
    away = self._leaving | self._back_s.keys()
    for role in self._rng.sample(
      [self._cluster.prefill, self._cluster.decode], 2
    ):
      there = [name for name in role if name not in away]
      if len(there) > 1:
        return self._rng.choice(there)
    return None

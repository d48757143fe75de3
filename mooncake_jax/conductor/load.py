# SPDX-License-Identifier: Apache-2.0
"""Believed load of the instances, kept true by events.

A prefill queue is the predicted seconds of each request placed there and not
yet prefilled; the first of them has run since it became first. A decode load
is its requests' rows and context tokens.
"""

from mooncake_jax.request import Request


class PrefillLoad:
  """The queue of one prefill instance."""

  def __init__(self):
    self._predicted_s: dict[str, float] = {}
    self._head_since_s = 0.0

  def add(self, request_id: str, predicted_s: float, now_s: float) -> None:
    if not self._predicted_s:
      self._head_since_s = now_s
    self._predicted_s[request_id] = predicted_s

  def remove(self, request_id: str, now_s: float) -> None:
    """Ignores one that is not there."""
    is_head = next(iter(self._predicted_s), None) == request_id
    self._predicted_s.pop(request_id, None)
    if is_head:
      self._head_since_s = now_s

  def queue_s(self, now_s: float) -> float:
    """EstimatePrefillQueueTime: what stands before a new request."""
    if not self._predicted_s:
      return 0.0
    head_s = next(iter(self._predicted_s.values()))
    ran_s = min(max(now_s - self._head_since_s, 0.0), head_s)
    return max(sum(self._predicted_s.values()) - ran_s, 0.0)

  def __len__(self) -> int:
    return len(self._predicted_s)


class DecodeLoad:
  """The requests placed at one decode instance, from placement to end."""

  def __init__(self, capacity_tokens: int):
    self.capacity_tokens = capacity_tokens
    self._context_tokens: dict[str, int] = {}
    self._reserved_tokens: dict[str, int] = {}

  def add(self, request: Request) -> None:
    tokens = request.num_prompt_tokens
    self._context_tokens[request.request_id] = tokens
    self._reserved_tokens[request.request_id] = (
      tokens + request.max_output_tokens
    )

  def grow(self, request_id: str, num_tokens: int) -> None:
    if request_id in self._context_tokens:
      self._context_tokens[request_id] += num_tokens

  def remove(self, request_id: str) -> None:
    self._context_tokens.pop(request_id, None)
    self._reserved_tokens.pop(request_id, None)

  @property
  def context_tokens(self) -> int:
    return sum(self._context_tokens.values())

  @property
  def free_tokens(self) -> int:
    return self.capacity_tokens - sum(self._reserved_tokens.values())

  def __len__(self) -> int:
    return len(self._context_tokens)

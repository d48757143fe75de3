# SPDX-License-Identifier: Apache-2.0
"""Chats whose prompts hold the model's real answers: a closed loop."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np

from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.costs.model import check_count
from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import Sampling
from mooncake_jax.workload.session_file import Message
from mooncake_jax.workload.session_file import Session


class Sessions:
  """Has chats: gives first requests, and a next one for each answer.

  It keeps no clock and starts nothing; the serve loop pulls:

    records, _ = serve(chats.initial(), conductor, cluster, chats.follow_up)

  A turn that can't be asked (its prompt is empty, too long or refused by the
  chat template) ends its session alone; `errors` tells which. An answer's text
  is encoded anew with its history; where that gives other tokens than the
  model put out, reuse ends there. In a simulation answers are empty.
  """

  def __init__(
    self,
    sessions: Sequence[Session],
    *,
    encode_chat: Callable[[Sequence[Message]], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    block_size_tokens: int,
    max_output_tokens: int,
    max_tokens: int | None = None,
    identity: str = '0',
    sampling: Sampling | None = None,
    stop_token_ids: tuple[int, ...] = (),
    tenant: str = '',
  ):
    """Makes a source of requests.

    Args:
      sessions: with unique request ids.
      encode_chat: token ids of a chat, ending where the assistant speaks.
      decode: text of an answer's token ids.
      block_size_tokens, identity: of the block keys.
      max_output_tokens: of every answer.
      max_tokens: what the model takes, prompt and output; None is any.
      sampling: of all requests; None is greedy.
      stop_token_ids: end an answer and are no part of its text.
      tenant: of all requests.

    Raises:
      ValueError: two turns of one name, max_output_tokens below 1.
    """
    check_count('Sessions: max_output_tokens', max_output_tokens)
    names = [name for session in sessions for name in session.request_ids]
    for name, count in Counter(names).items():
      if count > 1:
        raise ValueError(f'Sessions: request_id={name!r} is there twice')
    self.errors: list[str] = []
    self._sessions = tuple(sessions)
    self._encode_chat, self._decode = encode_chat, decode
    self._block_size_tokens, self._identity = block_size_tokens, identity
    self._max_output_tokens, self._max_tokens = max_output_tokens, max_tokens
    self._sampling = sampling or Sampling()
    self._stop_token_ids, self._tenant = stop_token_ids, tenant
    # What was asked and not yet answered, by request id.
    self._asked: dict[str, tuple[Session, int, list[Message]]] = {}

  def initial(self) -> list[Request]:
    """The first turn of every session, in order of arrival."""
    asked = [
      self._ask(session, 0, list(session.history), session.arrival_s)
      for session in self._sessions
    ]
    return sorted(
      (request for request in asked if request is not None),
      key=lambda request: request.arrival_s,
    )

  def next_turn(
    self, request_id: str, output_tokens: Sequence[int], now_s: float
  ) -> Request | None:
    """The next turn of the session that `request_id` is of, if it has one.

    Args:
      request_id: of a turn that was asked; each is answered once.
      output_tokens: the answer.
      now_s: when it ended; the next turn arrives gap_s later.

    Raises:
      ValueError: no turn of that id waits for its answer.
    """
    if request_id not in self._asked:
      raise ValueError(f'Sessions: {request_id=} waits for no answer')
    session, i, messages = self._asked.pop(request_id)
    if i + 1 == len(session.turns):
      return None
    ids = list(output_tokens)
    while ids and ids[-1] in self._stop_token_ids:
      ids.pop()
    answer = {'role': 'assistant', 'content': self._decode(ids)}
    history = [*messages, answer]
    return self._ask(session, i + 1, history, now_s + session.gap_s)

  def follow_up(self, record: RequestRecord) -> Request | None:
    """`next_turn` of a completed record; any other ends its session."""
    if record.request_id not in self._asked:
      return None
    if record.outcome != 'completed':
      del self._asked[record.request_id]
      return None
    assert record.finished_s is not None
    return self.next_turn(
      record.request_id, record.output_tokens, record.finished_s
    )

  def _ask(
    self, session: Session, i: int, history: list[Message], arrival_s: float
  ) -> Request | None:
    """Turn i as a request; None and an error where that can't be."""
    name = session.request_ids[i]
    messages = [*history, {'role': 'user', 'content': session.turns[i]}]
    try:
      request = self._request(name, self._encode_chat(messages), arrival_s)
    except ValueError as error:
      self.errors.append(f'{name}: {error}')
      return None
    self._asked[name] = session, i, messages
    return request

  def _request(
    self, name: str, ids: Sequence[int], arrival_s: float
  ) -> Request:
    prompt = np.array(ids, np.int32)
    longest = self._max_tokens
    if longest is not None and len(prompt) + self._max_output_tokens > longest:
      raise ValueError(
        f'num_prompt_tokens={len(prompt)} and max_output_tokens='
        f'{self._max_output_tokens} exceed max_tokens={longest}'
      )
    salt = self._tenant or None
    keys = prefix_keys(
      prompt, self._block_size_tokens, self._identity, salt=salt
    )
    return Request(
      request_id=name,
      arrival_s=arrival_s,
      num_prompt_tokens=len(prompt),
      max_output_tokens=self._max_output_tokens,
      block_keys=keys,
      prompt=prompt,
      sampling=self._sampling,
      stop_token_ids=self._stop_token_ids,
      tenant=self._tenant,
      identity=self._identity,
    )

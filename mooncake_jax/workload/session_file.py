# SPDX-License-Identifier: Apache-2.0
"""Chats as JSONL, two kinds of line, in one file or apart.

  {"session": "rivers", "system": "You are ...", "arrival_s": 2.0,
   "gap_s": 0.5, "turns": ["Read this ...", "And where does it end?"]}
  {"session": "rivers", "turn": 2, "arrival_s": 9.0, "messages":
   [{"role": "user", "content": "..."}, ...]}

The first is a script of what the user says: turn n + 1 is asked `gap_s` after
the answer to turn n, with the answer in its history. The second is one prompt
as it is, at its time; its last message is the user's. `system`, `arrival_s`,
`gap_s` and `turn` may be left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_jax.workload.json_lines import count_of
from mooncake_jax.workload.json_lines import number_of
from mooncake_jax.workload.json_lines import parse_object
from mooncake_jax.workload.json_lines import read_lines
from mooncake_jax.workload.json_lines import short
from mooncake_jax.workload.json_lines import value_of

ROLES = ('system', 'user', 'assistant')
_MAX_SECONDS = 1e9

# {'role': 'system' | 'user' | 'assistant', 'content': text}, oldest first.
Message = Mapping[str, str]


@dataclass(frozen=True)
class Session:
  """A chat to be had.

  Attributes:
    name: unique in a run, but for prompts of different turns.
    history: messages before the first turn: a system prompt, earlier turns.
    turns: what the user says, one text a turn, at least one.
    arrival_s: when the first turn is asked.
    gap_s: from an answer to the next turn.
    first_turn: number of the first turn.
  """

  name: str
  turns: tuple[str, ...]
  history: tuple[Message, ...] = ()
  arrival_s: float = 0.0
  gap_s: float = 0.0
  first_turn: int = 1

  @property
  def request_ids(self) -> tuple[str, ...]:
    """'name/turn' of each turn."""
    numbers = range(self.first_turn, self.first_turn + len(self.turns))
    return tuple(f'{self.name}/{number}' for number in numbers)


def load_sessions(path: str | Path) -> tuple[list[Session], list[str]]:
  """Reads both kinds of line, and the errors of the bad ones.

  Raises:
    OSError: the file can't be opened.
  """
  return read_lines(path, parse_session)


def parse_session(
  line: str | bytes, file: str | Path, line_number: int
) -> Session:
  """Reads one line of either kind.

  Raises:
    ValueError: one line that names file, line number, field and value.
  """
  where = f'{file}:{line_number}'
  fields = parse_object(line, where)
  if ('turns' in fields) == ('messages' in fields):
    raise ValueError(
      f'{where}: needs either turns or messages, found {short([*fields])}'
    )
  timed = {'arrival_s': 0.0, 'gap_s': 0.0, **fields}
  arrival_s, gap_s = (
    number_of(timed, key, where, _MAX_SECONDS) for key in ('arrival_s', 'gap_s')
  )
  name = _text(value_of(fields, 'session', where), 'session', where)
  if 'messages' in fields:
    messages = _messages(fields, where)
    turn = count_of(fields, 'turn', where) if 'turn' in fields else 1
    turns, history = (messages.pop()['content'],), tuple(messages)
    return Session(name, turns, history, arrival_s, gap_s, turn)
  texts = _list(fields, 'turns', where)
  turns = tuple(_text(t, f'turns[{i}]', where) for i, t in enumerate(texts))
  history = ()
  if 'system' in fields:
    system = _text(fields['system'], 'system', where)
    history = ({'role': 'system', 'content': system},)
  return Session(name, turns, history, arrival_s, gap_s)


def _messages(fields: dict[str, Any], where: str) -> list[Message]:
  messages = _list(fields, 'messages', where)
  for i, message in enumerate(messages):
    if not isinstance(message, dict) or message.get('role') not in ROLES:
      raise ValueError(
        f'{where}: messages[{i}]={short(message)} must have a role of {ROLES}'
      )
    _text(message.get('content'), f'messages[{i}].content', where)
  if messages[-1]['role'] != 'user':
    raise ValueError(
      f"{where}: messages[-1].role={messages[-1]['role']!r} must be 'user'"
    )
  return messages


def _list(fields: dict[str, Any], key: str, where: str) -> list[Any]:
  value = fields[key]
  if not isinstance(value, list) or not value:
    raise ValueError(f'{where}: {key}={short(value)} must be a list, not empty')
  return value


def _text(value: Any, key: str, where: str) -> str:
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f'{where}: {key}={short(value)} must be a text, not empty')
  return value

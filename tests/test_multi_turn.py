# SPDX-License-Identifier: Apache-2.0
"""Chats: files, closed loops, and histories that hold real answers."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from mooncake_jax.request import RequestRecord
from mooncake_jax.workload.multi_turn import Sessions
from mooncake_jax.workload.session_file import load_sessions
from mooncake_jax.workload.session_file import parse_session
from mooncake_jax.workload.session_file import Session
from mooncake_jax.workload.words import WordCodec

CODEC = WordCodec(vocab_size=5000, first_token=5)
SYSTEM = ({'role': 'system', 'content': 'be brief'},)


def chats(*sessions: Session, **options) -> Sessions:
  options = {
    'encode_chat': CODEC.encode_chat,
    'decode': CODEC.decode,
    'block_size_tokens': 2,
    'max_output_tokens': 4,
    **options,
  }
  return Sessions(sessions, **options)


def rivers(**fields) -> Session:
  return Session('rivers', ('where is it', 'and then', 'why'), **fields)


def test_each_turn_has_the_history_with_the_real_answer():
  source = chats(rivers(history=SYSTEM, arrival_s=2.0, gap_s=0.5))
  (first,) = source.initial()
  assert (first.request_id, first.arrival_s) == ('rivers/1', 2.0)
  second = source.next_turn('rivers/1', [77, 88], now_s=10.0)
  assert second is not None
  assert (second.request_id, second.arrival_s) == ('rivers/2', 10.5)
  assert second.prompt is not None and first.prompt is not None
  want = [
    *first.prompt, 77, 88, *CODEC.encode_chat(
      [{'role': 'user', 'content': 'and then'}]
    ),
  ]  # fmt: skip
  assert second.prompt.tolist() == want
  # The first prompt's blocks are reusable in the second.
  assert second.block_keys[: len(first.block_keys)] == first.block_keys
  third = source.next_turn('rivers/2', [1], now_s=11.0)
  assert third is not None and third.request_id == 'rivers/3'
  assert source.next_turn('rivers/3', [1], now_s=12.0) is None


def test_a_stop_token_is_no_part_of_the_answer():
  with_stop, without = chats(rivers(), stop_token_ids=(3,)), chats(rivers())
  for source in (with_stop, without):
    source.initial()
  a = with_stop.next_turn('rivers/1', [77, 3], 0.0)
  b = without.next_turn('rivers/1', [77], 0.0)
  assert a is not None and b is not None
  assert a.stop_token_ids == (3,)
  np.testing.assert_array_equal(a.prompt, b.prompt)


def test_first_turns_come_in_order_of_arrival():
  source = chats(
    Session('late', ('a',), arrival_s=5.0), Session('early', ('b',))
  )
  assert [r.request_id for r in source.initial()] == ['early/1', 'late/1']


def test_sessions_share_the_blocks_of_their_system_prompt():
  a, b = chats(
    Session('a', ('x y',), SYSTEM), Session('b', ('z',), SYSTEM)
  ).initial()
  assert a.block_keys[0] == b.block_keys[0]
  assert a.block_keys[-1] != b.block_keys[-1]


def test_follow_up_goes_on_after_completed_records_only():
  source = chats(rivers(), Session('lakes', ('a', 'b')))
  source.initial()
  done = RequestRecord('rivers/1', 3, 0.0, outcome='completed')
  done.finished_s, done.output_tokens = 4.0, [7]
  lost = RequestRecord('lakes/1', 3, 0.0, outcome='rejected', finished_s=1.0)
  following = source.follow_up(done)
  assert following is not None and following.arrival_s == 4.0
  assert source.follow_up(lost) is None
  assert source.follow_up(RequestRecord('other', 3, 0.0)) is None
  with pytest.raises(ValueError, match="request_id='lakes/1' waits for no"):
    source.next_turn('lakes/1', [7], 0.0)


def test_a_turn_that_is_too_long_ends_its_session_alone():
  long = Session('long', ('w ' * 50,))
  source = chats(rivers(), long, max_tokens=40)
  assert [r.request_id for r in source.initial()] == ['rivers/1']
  assert source.errors == [
    'long/1: num_prompt_tokens=52 and max_output_tokens=4 exceed max_tokens=40'
  ]
  # History grows over the limit in a later turn.
  assert source.next_turn('rivers/1', list(range(9, 60)), 0.0) is None
  assert source.errors[1].startswith('rivers/2: num_prompt_tokens=60')


def test_what_the_tokenizer_refuses_is_an_error_of_that_session():
  def refuse(messages):
    if messages[-1]['content'] == 'bad':
      raise ValueError('tokenizer.json: chat_template: roles')
    return [] if messages[-1]['content'] == 'empty' else [1, 2, 3]

  source = chats(
    *(Session(text, (text,)) for text in ('good', 'bad', 'empty')),
    encode_chat=refuse,
  )
  assert [r.request_id for r in source.initial()] == ['good/1']
  assert source.errors[0] == 'bad/1: tokenizer.json: chat_template: roles'
  assert 'the prompt is empty' in source.errors[1]


def test_two_turns_of_one_name_are_refused():
  with pytest.raises(ValueError, match="request_id='a/2' is there twice"):
    chats(Session('a', ('x', 'y')), Session('a', ('z',), first_turn=2))


@settings(deadline=None)
@given(st.lists(st.integers(0, 4999), max_size=20))
def test_words_of_an_answer_encode_to_its_tokens(ids):
  message = {'role': 'assistant', 'content': CODEC.decode(ids)}
  assert CODEC.encode_chat([message])[1:-1] == ids


@given(st.text(max_size=50))
def test_words_stay_in_the_vocabulary(text):
  ids = CODEC.encode_chat([{'role': 'user', 'content': text}])
  assert all(5 <= i < 5000 for i in ids) or 't' in text
  assert all(0 <= i < 5000 for i in ids)


def test_a_vocabulary_without_room_for_words_is_named():
  with pytest.raises(ValueError, match='WordCodec.vocab_size=8'):
    WordCodec(8, first_token=5)


def test_both_kinds_of_line_are_read_and_bad_ones_counted(tmp_path: Path):
  path = tmp_path / 'chats.jsonl'
  user = {'role': 'user', 'content': 'and now?'}
  answer = {'role': 'assistant', 'content': 'yes'}
  lines = [
    {'session': 'a', 'system': 's', 'turns': ['x', 'y'], 'gap_s': 1.5},
    {'session': 'b', 'turn': 2, 'arrival_s': 3, 'messages': [answer, user]},
    {'session': 'c', 'turns': []},
  ]
  path.write_text('\n\n'.join(map(json.dumps, lines)))
  sessions, errors = load_sessions(path)
  system = {'role': 'system', 'content': 's'}
  assert sessions == [
    Session('a', ('x', 'y'), (system,), gap_s=1.5),
    Session('b', ('and now?',), (answer,), arrival_s=3, first_turn=2),
  ]
  assert [s.request_ids for s in sessions] == [('a/1', 'a/2'), ('b/2',)]
  assert errors == [f'{path}:5: turns=[] must be a list, not empty']


@pytest.mark.parametrize(
  ('fields', 'error'),
  [
    ({}, 'needs either turns or messages'),
    ({'turns': ['x'], 'messages': []}, 'needs either'),
    ({'turns': ['x', ' ']}, r"turns\[1\]=' ' must be a text"),
    ({'turns': 'x'}, "turns='x' must be a list"),
    ({'turns': ['x'], 'session': 3}, 'session=3 must be a text'),
    ({'turns': ['x'], 'gap_s': -1}, 'gap_s=-1 must be'),
    ({'turns': ['x'], 'arrival_s': 'now'}, "arrival_s='now' must be"),
    ({'turns': ['x'], 'system': ''}, "system='' must be"),
    ({'messages': [{'role': 'bot', 'content': 'x'}]}, 'must have a role of'),
    ({'messages': [{'role': 'user'}]}, r'messages\[0\].content=None must'),
    ({'messages': [{'role': 'system', 'content': 'x'}]}, "must be 'user'"),
    (
      {'turn': 0, 'messages': [{'role': 'user', 'content': 'x'}]},
      'turn=0 must be an integer',
    ),
  ],
)
def test_a_bad_chat_is_named_with_file_line_field_and_value(fields, error):
  line = json.dumps({'session': 'a', **fields})
  with pytest.raises(ValueError, match=error) as caught:
    parse_session(line, 'chats.jsonl', 3)
  assert str(caught.value).startswith('chats.jsonl:3: ')
  assert '\n' not in str(caught.value)


def test_the_quickstart_chats_are_ten_of_three_turns(root: Path):
  path = root / 'configs/workload/quickstart_sessions.jsonl'
  sessions, errors = load_sessions(path)
  assert not errors
  assert [len(session.turns) for session in sessions] == [3] * 10
  assert all(s.history == sessions[0].history for s in sessions)
  for session in sessions:
    assert 200 <= len(session.turns[0].split()) <= 450
    assert max(len(turn.split()) for turn in session.turns[1:]) < 40

# SPDX-License-Identifier: Apache-2.0
"""Logs of OpenAI-style requests, and which format a trace has."""

import json
from pathlib import Path

import pytest

from mooncake_jax.assess.reuse import measure_reuse
from mooncake_jax.model.tokenizer import Tokenizer
from mooncake_jax.workload.generate import conversation
from mooncake_jax.workload.request_log import HashIds
from mooncake_jax.workload.request_log import load_request_log
from mooncake_jax.workload.request_log import LOG_TOKENS_PER_HASH_ID
from mooncake_jax.workload.trace import write_trace
from scripts.assessment.traces import read_trace
from scripts.assessment.traces import trace_format

TOKENIZER = Path(__file__).parent / 'data/tiny_tokenizer'
SYSTEM = {'role': 'system', 'content': 'You are a helpful river guide. ' * 12}


@pytest.fixture(scope='module')
def tokenizer():
  return Tokenizer.from_folder(TOKENIZER)


def write(path, *lines):
  path.write_text('\n'.join(map(json.dumps, lines)) + '\n')
  return path


def chat(text):
  return {'messages': [SYSTEM, {'role': 'user', 'content': text}]}


def test_chats_of_one_system_prompt_share_its_blocks(tmp_path, tokenizer):
  log = write(
    tmp_path / 'log.jsonl',
    {
      'timestamp': '2026-03-01T10:00:00.250Z',
      'body': {**chat('Where does it end?'), 'max_tokens': 90},
      'response': {'usage': {'completion_tokens': 7}},
    },
    {'timestamp': '2026-03-01T11:00:02+01:00', **chat('And begin?')},
    {'timestamp': 1772359203.0, 'prompt': [5] * 40, 'max_tokens': 3},
  )
  (first, second, third), errors = load_request_log(log, tokenizer)
  assert [first.timestamp_s, second.timestamp_s] == [0.0, 1.75]
  assert (first.output_tokens, third.output_tokens) == (7, 3)
  assert second.output_tokens == 256 and '1 requests do not say' in errors[0]
  prompt = tokenizer.encode_chat(chat('Where does it end?')['messages'])
  other = tokenizer.encode_chat(chat('And begin?')['messages'])
  same = next(i for i, (a, b) in enumerate(zip(prompt, other)) if a != b)
  assert first.input_tokens == len(prompt) and same >= 16
  shared = [a == b for a, b in zip(first.hash_ids, second.hash_ids)]
  assert shared.index(False) == same // 16
  assert len(third.hash_ids) == 3 and not {*third.hash_ids} & {*first.hash_ids}


def test_tenants_have_ids_of_their_own():
  ids = HashIds()
  prompt = list(range(40))
  assert ids.of(prompt) == ids.of(prompt)
  assert not {*ids.of(prompt, 'a')} & {*ids.of(prompt, 'b')}


@pytest.mark.parametrize(
  'line,named',
  [
    ({'timestamp': 1, 'messages': []}, 'messages=\\[\\] must be a list'),
    ({'timestamp': 1, 'prompt': ''}, 'the prompt is empty'),
    ({'timestamp': 1, 'prompt': 7}, 'needs messages, or a prompt'),
    ({'timestamp': 1, 'prompt': [2**31]}, 'needs messages, or a prompt'),
    ({'timestamp': 1, 'prompt': [-1]}, 'needs messages, or a prompt'),
    ({'prompt': [1]}, 'timestamp is missing'),
    ({'timestamp': 'noon', 'prompt': [1]}, "timestamp='noon' must be"),
    ({'timestamp': 1, 'prompt': [1], 'max_tokens': -2}, 'max_tokens=-2 must'),
    ({'timestamp': 1, 'body': 3}, 'body=3 must be an object'),
    ({'timestamp': 1, 'prompt': [1], 'tenant': 3}, 'tenant=3 must be a text'),
    (
      {'timestamp': 1, 'messages': [{'role': 'tool', 'content': 'x'}]},
      'messages\\[0\\]=.* must have a role',
    ),
    (
      {'timestamp': 1, 'messages': [{'role': 'user', 'content': None}]},
      'messages\\[0\\].content=None must be text',
    ),
  ],
)
def test_a_bad_line_costs_itself_and_names_its_field(
  tmp_path, tokenizer, line, named
):
  log = write(tmp_path / 'log.jsonl', line, {'created': 2, 'prompt': [1, 2]})
  rows, errors = load_request_log(log, tokenizer)
  assert len(rows) == 1
  with pytest.raises(ValueError, match=f'log.jsonl:1: {named}'):
    raise ValueError(errors[0])


def test_a_chat_that_its_template_refuses_is_named(tmp_path):
  encoder = Tokenizer.from_folder(TOKENIZER)
  encoder.chat_template = "{{ raise_exception('after you') }}"
  log = write(tmp_path / 'log.jsonl', {'timestamp': 1, **chat('Well?')})
  rows, (error,) = load_request_log(log, encoder)
  assert not rows and error.startswith(f'{log}:1: messages: ')
  assert error.endswith('after you')


def test_formats_are_found_out(tmp_path):
  write_trace(tmp_path / 'a', conversation(3))
  (tmp_path / 'b').write_text('TIMESTAMP,ContextTokens,GeneratedTokens\n')
  (tmp_path / 'c').write_text('Timestamp,Model,Request tokens,Response tokens')
  write(tmp_path / 'd', {'chat_id': 1, 'hash_ids': [1]})
  write(tmp_path / 'e', {'timestamp': 1, 'prompt': [1, 2, 3]})
  found = [trace_format(tmp_path / name) for name in 'abcde']
  assert found == ['mooncake', 'azure', 'burstgpt', 'bailian', 'requests']
  write(tmp_path / 'f', {'x': 1})
  with pytest.raises(ValueError, match='neither hash_ids nor body'):
    trace_format(tmp_path / 'f')
  name, read = read_trace(tmp_path / 'e')
  assert name == 'requests' and read.tokens_per_hash_id == 16
  write(tmp_path / 'g', {'timestamp': 1, 'prompt': 'text'})
  with pytest.raises(ValueError, match='--tokenizer is not given'):
    read_trace(tmp_path / 'g')
  _, read = read_trace(tmp_path / 'g', TOKENIZER)
  assert len(read.rows) == 1


def test_a_logs_reuse_is_measured_in_blocks_of_any_size(tmp_path, tokenizer):
  turns = [
    {'timestamp': i, **chat(f'Question {i % 3}? ' + 'Where? ' * 60)}
    for i in range(9)
  ]
  log = write(tmp_path / 'log.jsonl', *turns)
  rows, _ = load_request_log(log, tokenizer)
  found = measure_reuse(rows, LOG_TOKENS_PER_HASH_ID, 32)
  assert found is not None
  # The system prompt once, and each question's prompt twice.
  assert found.hit_prompts == 8 / 9 and found.hit_rate > 0.6
  sizes = [w.block_size_tokens for w in found.working_sets]
  rates = [w.hit_rate for w in found.working_sets]
  assert sizes == [16, 32, 64, 128, 256, 512]
  assert rates == sorted(rates, reverse=True)

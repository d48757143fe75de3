# SPDX-License-Identifier: Apache-2.0
"""The server over a simulated cluster: shapes, limits, refusals, ends."""

import json
from pathlib import Path

import pytest

from gateway_pieces import CHATS
from gateway_pieces import COMPLETIONS
from gateway_pieces import events
from gateway_pieces import running
from gateway_pieces import simulated
from lifecycle import SPEC
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.gateway.answers import ChatChunk
from mooncake_jax.gateway.answers import ChatCompletion
from mooncake_jax.gateway.answers import Completion
from mooncake_jax.gateway.errors import ErrorBody
from mooncake_jax.gateway.limits import GatewaySpec
from scripts.config import load
from scripts.experiment import Experiment
from scripts.serving import prepare

ROOT = Path(__file__).resolve().parents[1]
TEXT = {'model': 'tiny', 'prompt': 'a b c d e f g h i'}
CHAT = {'model': 'tiny', 'messages': [{'role': 'user', 'content': 'a b c'}]}


@pytest.mark.parametrize(
  'path', sorted(ROOT.glob('configs/serve/*.gin')), ids=lambda path: path.stem
)
def test_every_config_of_a_server_builds_and_tells_its_command(path):
  text, name = path.read_text(), path.relative_to(ROOT)
  assert text.startswith('# ') and f'scripts/serve.py {name}' in text
  experiment, _ = load(path, (), Experiment)
  assert experiment.workload is None
  with pytest.raises(ValueError, match='scripts/serve.py'):
    prepare(experiment, experiment.model.read_config())


@pytest.fixture(scope='module')
def server():
  spec = GatewaySpec(model_name='tiny', max_body_bytes=4000, max_choices=6)
  rules = ConductorSpec(admission='none', keep_explanations=True)
  with running(simulated(gateway=spec, conductor=rules)) as found:
    yield found


def test_answers_are_what_the_schema_says(server):
  status, _, body = server.post(COMPLETIONS, {**TEXT, 'max_tokens': 5})
  answer = Completion.model_validate(body)
  assert status == 200 and answer.usage is not None
  assert answer.usage.prompt_tokens == 9 and answer.usage.completion_tokens == 5
  assert answer.choices[0].finish_reason == 'length'
  status, _, body = server.post(CHATS, {**CHAT, 'max_tokens': 5})
  chat = ChatCompletion.model_validate(body)
  assert chat.choices[0].message.content.count('t') == 5


@pytest.mark.parametrize('path, asked', [(COMPLETIONS, TEXT), (CHATS, CHAT)])
def test_a_stream_says_the_same_as_the_whole(server, path, asked):
  asked = {**asked, 'max_tokens': 7, 'n': 2}
  _, _, whole = server.post(path, asked)
  options = {'include_usage': True}
  status, headers, text = server.post(
    path, {**asked, 'stream': True, 'stream_options': options}
  )
  assert status == 200
  assert headers['content-type'].startswith('text/event-stream')
  chunks = events(text)
  schema = ChatChunk if path == CHATS else Completion
  for chunk in chunks:
    schema.model_validate(chunk)
  assert chunks[-1]['choices'] == [] and chunks[-1]['usage'] == whole['usage']
  for choice in whole['choices']:
    mine = [
      c
      for chunk in chunks
      for c in chunk['choices']
      if c['index'] == choice['index']
    ]
    if path == CHATS:
      said = ''.join(c['delta'].get('content') or '' for c in mine)
      assert mine[0]['delta']['role'] == 'assistant'
      assert said == choice['message']['content']
    else:
      assert ''.join(c['text'] for c in mine) == choice['text']
    reasons = [c['finish_reason'] for c in mine if c['finish_reason']]
    assert reasons == [choice['finish_reason']] == ['length']


def test_prompts_may_be_many_and_tokens(server):
  asked = {**TEXT, 'max_tokens': 2, 'n': 2}
  for prompt in (['a b', 'c'], [[5, 6], [7]]):
    _, _, body = server.post(COMPLETIONS, {**asked, 'prompt': prompt})
    assert [c['index'] for c in body['choices']] == [0, 1, 2, 3]
    assert body['usage']['prompt_tokens'] == 3
    assert body['usage']['completion_tokens'] == 8
  _, _, body = server.post(
    COMPLETIONS, {**asked, 'n': 1, 'prompt': [5, 6], 'echo': True}
  )
  assert body['choices'][0]['text'].startswith('t5 t6')


def test_a_stop_string_ends_an_answer_and_its_request(server):
  _, _, whole = server.post(COMPLETIONS, {**TEXT, 'max_tokens': 6})
  words = whole['choices'][0]['text'].split()
  _, _, body = server.post(
    COMPLETIONS, {**TEXT, 'max_tokens': 60, 'stop': [words[3]]}
  )
  (choice,) = body['choices']
  assert choice['text'].split() == words[:3]
  assert choice['finish_reason'] == 'stop'
  assert body['usage']['completion_tokens'] < 60


def test_the_next_turn_reuses_prompt_and_answer(server):
  first = [{'role': 'user', 'content': ' '.join('abcdefghij' * 3)}]
  _, _, body = server.post(
    CHATS, {'model': 'tiny', 'messages': first, 'max_tokens': 20}
  )
  said = body['choices'][0]['message']
  second = [*first, {'role': 'assistant', 'content': said['content']}]
  second.append({'role': 'user', 'content': 'x y'})
  _, _, body = server.post(
    CHATS, {'model': 'tiny', 'messages': second, 'max_tokens': 2}
  )
  cached = body['usage']['prompt_tokens_details']['cached_tokens']
  assert cached > 32  # beyond the first prompt: of its answer too


@pytest.mark.parametrize(
  'path, changes, param',
  [
    (COMPLETIONS, {'temperature': 3}, 'temperature'),
    (COMPLETIONS, {'temperature': '1'}, 'temperature'),
    (COMPLETIONS, {'max_tokens': 10**6}, 'prompt'),
    (COMPLETIONS, {'max_tokens': 0}, 'max_tokens'),
    (COMPLETIONS, {'prompt': ''}, 'prompt'),
    (COMPLETIONS, {'prompt': [10**6]}, 'prompt'),
    (COMPLETIONS, {'n': 7}, 'n'),
    (COMPLETIONS, {'logit_bias': {'5': 1}}, 'logit_bias'),
    (COMPLETIONS, {'presence_penalty': 1}, 'presence_penalty'),
    (COMPLETIONS, {'logprobs': 2}, 'logprobs'),
    (COMPLETIONS, {'best': 2}, 'best'),
    (CHATS, {'tools': []}, 'tools'),
    (CHATS, {'messages': [{'role': 'tool', 'content': ''}]}, 'messages'),
    (CHATS, {'messages': []}, 'messages'),
  ],
)
def test_what_is_wrong_is_named(server, path, changes, param):
  asked = {**(CHAT if path == CHATS else TEXT), **changes}
  status, _, body = server.post(path, asked)
  assert status == 400, body
  error = ErrorBody.model_validate(body).error
  assert error.param == param and error.type == 'invalid_request_error'
  assert error.message and error.code


@pytest.mark.parametrize(
  'body, status',
  [
    (b'{"model": "tiny"', 400),
    (b'\xff\xfe{}', 400),
    (b'[1, 2]', 400),
    (b'{"model": "tiny", "prompt": NaN}', 400),
    (b'[' * 3000, 400),
    (b'{"model": "other", "prompt": "a"}', 404),
    (b' ' * 5000, 413),
  ],
)
def test_bodies_that_are_none_are_refused(server, body, status):
  found, _, answer = server.post(COMPLETIONS, body)
  assert found == status
  ErrorBody.model_validate(answer)


def test_paths_methods_and_types_are_refused_alike(server):
  for status, (found, _, body) in (
    (404, server.get('/v2/nothing')),
    (405, server.get(COMPLETIONS)),
    (404, server.get('/v1/models/other')),
    (404, server.get('/v1/conductor/explain/cmpl-0')),
    (415, server.post(COMPLETIONS, TEXT, **{'content-type': 'text/plain'})),
  ):
    assert found == status
    ErrorBody.model_validate(body)
  _, _, told = server.get('/v1/models/other')
  assert told['error']['message'] == ("model: 'other' is not served, 'tiny' is")


def test_a_decision_is_explained(server):
  _, _, body = server.post(COMPLETIONS, {**TEXT, 'max_tokens': 2})
  status, _, found = server.get(f'/v1/conductor/explain/{body["id"]}')
  (request,) = found['requests']
  assert status == 200 and request['decision'] == 'placed'
  assert len(request['candidates']['prefill']) == SPEC.prefill_instances
  assert request['predicted']['prefill'].startswith('prefill')


def test_figures_are_told(server):
  server.post(COMPLETIONS, {**TEXT, 'max_tokens': 2})
  status, _, page = server.get('/metrics')
  assert status == 200
  figures = dict(
    line.rsplit(' ', 1) for line in page.splitlines() if line[0] != '#'
  )
  assert float(figures['mooncake_requests_total{outcome="completed"}']) >= 1
  assert float(figures['mooncake_ttft_seconds_count']) >= 1
  assert float(figures['mooncake_open_requests']) == 0
  links = [n for n in figures if n.startswith('mooncake_link_bytes{')]
  assert sum(float(figures[name]) for name in links) > 0
  used = 'mooncake_store_used_bytes{medium="host",segment="prefill0"}'
  assert used in figures
  assert server.get('/health')[2] == {'status': 'ok'}


def test_the_document_names_what_is_served(server):
  _, _, document = server.get('/openapi.json')
  assert {COMPLETIONS, CHATS, '/v1/models'} <= {*document['paths']}
  text = json.dumps(document)
  for name in document['components']['schemas']:
    assert f'#/components/schemas/{name}' in text

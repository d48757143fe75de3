# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Python client against a live server on SmolLM2."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
import json
import math
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway_pieces import running
from scripts.config import load
from scripts.experiment import Experiment

ROOT = Path(__file__).resolve().parents[1]
MODEL = 'smollm2-135m'
RUN = 'configs/serve/smollm2.gin'
SMALL = (
  'ClusterSpec.max_batch=4',
  'ClusterSpec.max_tokens=512',
  'ClusterSpec.layers_per_transfer=30',
  'ClusterSpec.chunk_tokens=128',
)
SKY = [{'role': 'user', 'content': 'Why is the sky blue?'}]
LIMIT_S = 120.0
EXPECTED = Path(__file__).parent / 'data/smollm2_greedy.json'

if not (ROOT / 'models' / MODEL).exists():
  pytest.skip(
    f'models/{MODEL} is not there: scripts/get_model.py',
    allow_module_level=True,
  )


@pytest.fixture(scope='module')
def server():
  experiment, _ = load(RUN, SMALL, Experiment)
  with running(experiment) as found:
    yield found


@pytest.fixture(scope='module')
def client(server):
  with openai.OpenAI(
    base_url=f'{server.url}/v1', api_key='none', timeout=LIMIT_S, max_retries=0
  ) as found:
    yield found


def greedy(client, **changes):
  asked = {'max_tokens': 12, 'temperature': 0.0, **changes}
  return client.chat.completions.create(model=MODEL, messages=SKY, **asked)


def test_what_comes_is_what_the_reference_implementation_writes(client, server):
  """As what every run on devices serves (test_served_tokens.py)."""
  decode = server.made.served.codec.decode
  asked = {
    'model': MODEL,
    'temperature': 0.0,
    'max_tokens': 40,
    'extra_body': {'ignore_eos': True},
  }

  def check(entry) -> None:
    prompt, text = entry['prompt'], decode(entry['tokens'])
    if isinstance(prompt, str):
      answer = client.completions.create(**asked, prompt=prompt)
      assert answer.choices[0].text == text
    else:
      answer = client.chat.completions.create(**asked, messages=prompt)
      assert answer.choices[0].message.content == text
    assert answer.usage.prompt_tokens == len(entry['prompt_ids'])
    assert answer.usage.completion_tokens == 40

  entries = json.loads(EXPECTED.read_text())
  with ThreadPoolExecutor(len(entries)) as pool:
    assert len([*pool.map(check, entries)]) == len(entries)


def test_a_stream_has_the_same_text_and_usage(client):
  whole = greedy(client)
  chunks = [
    *greedy(client, stream=True, stream_options={'include_usage': True})
  ]
  said = ''.join(
    chunk.choices[0].delta.content or '' for chunk in chunks if chunk.choices
  )
  assert said == whole.choices[0].message.content
  assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
  assert sum(bool(chunk.choices) for chunk in chunks) > 6  # as it came


def test_completions_echo_stop_and_draw_alike_with_a_seed(client):
  asked = {'model': MODEL, 'prompt': 'The capital of France is'}
  answer = client.completions.create(
    **asked, max_tokens=8, temperature=0, echo=True, stop='.'
  )
  assert answer.choices[0].text == 'The capital of France is Paris'
  assert answer.choices[0].finish_reason == 'stop'
  drawn = [
    [
      choice.text
      for choice in client.completions.create(
        **asked, max_tokens=8, n=3, seed=seed
      ).choices
    ]
    for seed in (1, 1, 2)
  ]
  assert drawn[0] == drawn[1] != drawn[2]
  assert len({*drawn[0]}) > 1


def test_prompts_are_text_or_tokens_one_or_many(client, server):
  codec = server.made.served.codec
  texts = ['The capital of France is', 'One, two, three,']
  asked = {'model': MODEL, 'max_tokens': 4, 'temperature': 0}
  by_text = client.completions.create(**asked, prompt=texts)
  by_tokens = client.completions.create(
    **asked, prompt=[codec.encode(text) for text in texts]
  )
  said = [choice.text for choice in by_text.choices]
  assert said == [choice.text for choice in by_tokens.choices]
  assert said[0] != said[1]


def test_log_probabilities_of_every_token_in_both_shapes(client):
  chat = greedy(client, max_tokens=4, logprobs=True, top_logprobs=3)
  content = chat.choices[0].logprobs.content
  assert len(content) == 4
  for token in content:
    assert len(token.top_logprobs) == 3
    assert token.top_logprobs[0].token == token.token  # greedy
    assert token.logprob == token.top_logprobs[0].logprob <= 0
    assert bytes(token.bytes).decode() == token.token
  said = ''.join(token.token for token in content)
  assert said == chat.choices[0].message.content
  text = client.completions.create(
    model=MODEL, prompt='Hello', max_tokens=4, temperature=0, logprobs=2
  )
  found = text.choices[0].logprobs
  assert ''.join(found.tokens) == text.choices[0].text
  for token, own, top in zip(
    found.tokens, found.token_logprobs, found.top_logprobs, strict=True
  ):
    assert math.isclose(own, top[token])
  chunks = greedy(client, max_tokens=3, logprobs=True, stream=True)
  told = [c.choices[0].logprobs for c in chunks]
  assert sum(len(found.content) for found in told if found) == 3


def test_an_end_token_ends_unless_it_is_to_be_ignored(client):
  yes = [{'role': 'user', 'content': 'Say "yes" and nothing else.'}]
  asked: dict[str, Any] = {
    'model': MODEL,
    'messages': yes,
    'temperature': 0,
    'max_tokens': 60,
  }
  short = client.chat.completions.create(**asked)
  assert short.choices[0].finish_reason == 'stop'
  assert '<|im_end|>' not in short.choices[0].message.content
  count = short.usage.completion_tokens
  assert count < 60
  asked['max_tokens'] = count + 3
  for extra in ({'ignore_eos': True}, {'min_tokens': count + 3}):
    long = client.chat.completions.create(**asked, extra_body=extra)
    assert long.usage.completion_tokens == count + 3
  stopped = client.chat.completions.create(
    **asked, extra_body={'min_tokens': count - 1}
  )
  assert stopped.usage.completion_tokens == count
  assert stopped.choices == short.choices


def test_errors_are_the_clients_own(client):
  with pytest.raises(openai.BadRequestError) as caught:
    greedy(client, max_tokens=100_000)
  assert caught.value.code == 'context_length_exceeded'
  with pytest.raises(openai.BadRequestError, match='unknown or not supported'):
    greedy(client, extra_body={'guided_json': {}})
  with pytest.raises(openai.NotFoundError):
    client.completions.create(model='other', prompt='a')
  assert [model.id for model in client.models.list()] == [MODEL]
  assert client.models.retrieve(MODEL).id == MODEL


def test_a_stream_that_is_closed_is_cancelled(client, server):
  driver = server.made.driver
  before = driver.num_open
  stream = greedy(client, max_tokens=400, stream=True)
  next(iter(stream))
  assert driver.num_open == before + 1
  stream.close()
  assert greedy(client, max_tokens=2).usage.completion_tokens == 2
  page = server.get('/metrics')[2]
  assert 'mooncake_requests_total{outcome="cancelled"} 1.0' in page


def test_many_at_once_are_batched_and_say_what_they_say_alone(server):
  prompts = [f'{n} plus {n} is' for n in ('One', 'Two', 'Three', 'Four')]
  asked = {'model': MODEL, 'max_tokens': 6, 'temperature': 0}

  async def ask() -> tuple[list[str], list[str]]:
    async with openai.AsyncOpenAI(
      base_url=f'{server.url}/v1', api_key='none', timeout=LIMIT_S
    ) as client:

      async def one(prompt: str) -> str:
        answer = await client.completions.create(**asked, prompt=prompt)
        return answer.choices[0].text

      alone = [await one(prompt) for prompt in prompts]
      return alone, [*await asyncio.gather(*map(one, prompts))]

  alone, together = asyncio.run(ask())
  assert alone == together

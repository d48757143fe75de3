# SPDX-License-Identifier: Apache-2.0
"""Bodies that are nearly what the API asks for, and not quite."""

import json
import random
from typing import Any

CHAT = '/v1/chat/completions'
TEXT = '/v1/completions'
# JSON that Python's own writer would not write.
NUMBERS = (
  b'1e309',
  b'-1e309',
  b'1' + b'0' * 400,
  b'-' + b'9' * 5000,
  b'NaN',
  b'-Infinity',
  b'0.1e-400',
  b'9223372036854775808',
  b'-1',
  b'2147483648',
  b'00',
  b'1.',
  b'0x10',
)
ODD_BYTES = (
  b'\xff\xfe',
  b'\xc3\x28',
  b'\xed\xa0\x80',
  b'\xf4\x90\x80\x80',
  b'\x00',
  b'\x1b[2J',
  b'\\ud800',
  b'\\ud83d\\u0041',
  b'\\u0000',
  b'\\x41',
  '\u202e\u0301'.encode() * 50,
)
_MARK = 'MARK'


def good(model: str, path: str, stream: bool = False) -> dict[str, Any]:
  """A small request that any server answers."""
  body: dict[str, Any] = {'model': model, 'max_tokens': 3, 'temperature': 0}
  if stream:
    body |= {'stream': True, 'stream_options': {'include_usage': True}}
  if path == CHAT:
    return body | {'messages': [{'role': 'user', 'content': 'Say hello.'}]}
  return body | {'prompt': 'Say hello.'}


def nearly(rng: random.Random, model: str, path: str) -> bytes:
  """A body in one of the ways below."""
  way = rng.choice((_wrong_value, _odd_number, _odd_text, _not_json, _nested))
  return way(rng, good(model, path, rng.random() < 0.3))


def _anything(rng: random.Random, depth: int = 0) -> Any:
  kinds = 8 if depth < 3 else 6
  match rng.randrange(kinds):
    case 0:
      return rng.choice((None, True, False))
    case 1:
      return rng.choice((0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30))
    case 2:
      return rng.choice((0.5, -0.0, 1e-320, 1e300, 2.5))
    case 3:
      return rng.choice(('', 'x', '1', 'null', '\N{BELL}', 'é' * 300))
    case 4:
      return 'a ' * rng.randrange(5000)
    case 5:
      return [rng.randrange(-5, 60_000) for _ in range(rng.randrange(40))]
    case 6:
      return [_anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    case _:
      return {
        rng.choice(('role', 'content', 'type', 'text', '')): _anything(
          rng, depth + 1
        )
        for _ in range(rng.randrange(4))
      }


FIELDS = (
  'model',
  'prompt',
  'messages',
  'max_tokens',
  'max_completion_tokens',
  'min_tokens',
  'temperature',
  'top_p',
  'top_k',
  'min_p',
  'n',
  'best_of',
  'stop',
  'stop_token_ids',
  'stream',
  'stream_options',
  'seed',
  'logprobs',
  'top_logprobs',
  'echo',
  'suffix',
  'ignore_eos',
  'priority',
  'cache_salt',
  'user',
  'logit_bias',
  'presence_penalty',
  'response_format',
  'tools',
)


def _wrong_value(rng: random.Random, body: dict[str, Any]) -> bytes:
  for _ in range(rng.randrange(1, 4)):
    body[rng.choice(FIELDS)] = _anything(rng)
  if rng.random() < 0.2:
    del body[rng.choice([*body])]
  return json.dumps(body).encode()


def _marked(rng: random.Random, body: dict[str, Any], quotes: bool) -> bytes:
  """A body of which one value is to be put in by hand."""
  body[rng.choice(FIELDS)] = _MARK
  text = json.dumps(body).encode()
  return text if quotes else text.replace(b'"MARK"', b'MARK')


def _odd_number(rng: random.Random, body: dict[str, Any]) -> bytes:
  text = _marked(rng, body, quotes=False)
  return text.replace(b'MARK', rng.choice(NUMBERS))


def _odd_text(rng: random.Random, body: dict[str, Any]) -> bytes:
  text = json.dumps(body).encode()
  if rng.random() < 0.7:
    return text.replace(b'hello', rng.choice(ODD_BYTES) * rng.randrange(1, 4))
  return _marked(rng, body, quotes=True).replace(b'MARK', rng.choice(ODD_BYTES))


def _not_json(rng: random.Random, body: dict[str, Any]) -> bytes:
  text = json.dumps(body).encode()
  at = rng.randrange(len(text))
  return rng.choice(
    (
      b'',
      b'null',
      b'[]',
      b'"' + text[:at],
      text[:at],
      text + text,
      text + b'\x00',
      b'\xef\xbb\xbf' + text,
      text.decode().encode('utf-16'),
      rng.randbytes(at),
      text[:at] + rng.randbytes(3) + text[at:],
      text.replace(b'"model"', b'"model": 1, "model"', 1),
    )
  )


def _nested(rng: random.Random, body: dict[str, Any]) -> bytes:
  deep = rng.choice((50, 1000, 100_000))
  opened, closed = rng.choice(((b'[', b']'), (b'{"a":', b'}')))
  value = opened * deep + b'1' + closed * rng.choice((deep, 0))
  return _marked(rng, body, quotes=False).replace(b'MARK', value)

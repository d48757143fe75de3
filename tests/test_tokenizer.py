# SPDX-License-Identifier: Apache-2.0
"""Token ids, texts and chats as the reference implementation has them.

tests/data/make_goldens.py recorded what is expected, of a tiny tokenizer and
of SmolLM2's.
"""

import json
from pathlib import Path
import shutil
import threading
import time

import pytest

from mooncake_jax.model.tokenizer import Tokenizer
from tests.write_gguf import write_gguf

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).parent / 'data'
TINY = DATA / 'tiny_tokenizer'
SMOLLM2 = ROOT / 'models' / 'smollm2-135m'
CHAT = [{'role': 'user', 'content': 'hi'}]


def tiny_from_gguf(tmp_path: Path) -> Tokenizer:
  path = write_gguf(DATA / 'llama2', tmp_path / 'model.gguf')
  return Tokenizer.from_gguf(path)


@pytest.fixture(params=['tiny', 'tiny from GGUF', 'smollm2'])
def case(request, tmp_path) -> tuple[Tokenizer, dict]:
  """A tokenizer and what is expected of it."""
  if request.param == 'smollm2':
    if not SMOLLM2.is_dir():
      pytest.skip(f'no {SMOLLM2}: scripts/get_model.py smollm2-135m fetches it')
    expected = json.loads((DATA / 'smollm2_tokens.json').read_text())
    return Tokenizer.from_folder(SMOLLM2), expected
  expected = json.loads((TINY / 'expected.json').read_text())
  if request.param == 'tiny':
    return Tokenizer.from_folder(TINY), expected
  return tiny_from_gguf(tmp_path), expected


def test_awkward_strings_have_the_reference_ids(case):
  tokenizer, expected = case
  for entry in expected['strings']:
    assert tokenizer.encode(entry['text']) == entry['ids'], entry['text']


def test_ids_have_the_reference_text(case):
  tokenizer, expected = case
  for entry in expected['strings']:
    whole = tokenizer.decode(entry['ids'], skip_special_tokens=False)
    assert whole == entry['decoded']
    assert tokenizer.decode(entry['ids']) == entry['without_special']


def test_byte_level_text_survives_encoding(case):
  tokenizer, expected = case
  for entry in expected['strings']:
    ids = tokenizer.encode(entry['text'])
    back = tokenizer.decode(ids, skip_special_tokens=False)
    assert back == entry['text']


def test_the_bytes_of_tokens_are_those_of_the_text(case):
  """Of a character that several tokens make, each has its own."""
  tokenizer, _ = case
  text = 'Grüße, 日本 🙂!'
  tokens = tokenizer.encode(text, add_special_tokens=False)
  told = [tokenizer.token_bytes(token) for token in tokens]
  assert b''.join(told).decode().removeprefix(' ') == text
  assert any(b'\xef\xbf\xbd' in tokenizer.decode([t]).encode() for t in tokens)
  assert tokenizer.token_bytes(tokenizer.eos_token_ids[0]).isascii()
  assert tokenizer.token_bytes(10**6) == b''


def test_chats_have_the_reference_text_and_ids(case):
  tokenizer, expected = case
  for entry in expected['chats']:
    text = tokenizer.apply_chat_template(entry['messages'])
    assert text == entry['text']
    assert tokenizer.encode_chat(entry['messages']) == entry['ids']


def test_special_tokens_are_known(case):
  tokenizer, _ = case
  assert tokenizer.bos_token == '<|im_start|>'
  assert tokenizer.eos_token == '<|im_end|>'
  assert tokenizer.bos_token_id == 1
  assert tokenizer.eos_token_ids == (2,)


def test_a_chat_without_prompt_ends_with_the_last_message():
  tokenizer = Tokenizer.from_folder(TINY)
  prompted = tokenizer.apply_chat_template(CHAT)
  plain = tokenizer.apply_chat_template(CHAT, add_generation_prompt=False)
  assert prompted == plain + '<|im_start|>assistant\n'
  assert plain.endswith('hi<|im_end|>\n')


@pytest.fixture
def folder(tmp_path) -> Path:
  """A copy of the tiny tokenizer, to be changed."""
  return Path(shutil.copytree(TINY, tmp_path / 'tokenizer'))


def configure(folder: Path, **fields) -> None:
  path = folder / 'tokenizer_config.json'
  config = {**json.loads(path.read_text()), **fields}
  path.write_text(json.dumps(config))


def test_the_template_may_lie_in_the_config(folder):
  (folder / 'chat_template.jinja').unlink()
  assert Tokenizer.from_folder(folder).chat_template is None
  named = [
    {'name': 'tool_use', 'template': 'no'},
    {'name': 'default', 'template': 'yes'},
  ]
  for template in ('yes', named):
    configure(folder, chat_template=template)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.apply_chat_template(CHAT) == 'yes'


def test_tokens_may_be_written_as_objects(folder):
  configure(folder, bos_token={'content': '<|im_end|>', 'lstrip': False})
  assert Tokenizer.from_folder(folder).bos_token_id == 2


@pytest.mark.parametrize(('ids', 'found'), [(5, (5,)), ([0, 2], (0, 2))])
def test_end_tokens_are_those_of_the_generation_config(folder, ids, found):
  text = json.dumps({'eos_token_id': ids})
  (folder / 'config.json').write_text('{"eos_token_id": 7}')
  assert Tokenizer.from_folder(folder).eos_token_ids == (7,)
  (folder / 'generation_config.json').write_text(text)
  assert Tokenizer.from_folder(folder).eos_token_ids == found


@pytest.mark.parametrize(
  ('template', 'words'),
  [
    ("{{ raise_exception('roles must alternate') }}", 'roles must alternate'),
    ('{{ messages[0].content }', 'unexpected'),
    ('{{ messages.append(1) }}', 'unsafe'),
    ("{{ ''.__class__.__mro__ }}", 'unsafe'),
    ('{{ missing.field }}', "'missing' is undefined"),
  ],
)
def test_a_template_that_fails_says_so(folder, template, words):
  (folder / 'chat_template.jinja').write_text(template)
  tokenizer = Tokenizer.from_folder(folder)
  with pytest.raises(ValueError, match=words) as raised:
    tokenizer.apply_chat_template(CHAT)
  assert f'{folder}: chat_template' in str(raised.value)


def test_a_model_without_template_refuses_chats(folder):
  (folder / 'chat_template.jinja').unlink()
  with pytest.raises(ValueError, match='chat_template=None'):
    Tokenizer.from_folder(folder).apply_chat_template(CHAT)


def test_missing_and_damaged_files_are_named(folder):
  path = folder / 'tokenizer.json'
  path.write_text(path.read_text()[:-100])
  with pytest.raises(ValueError, match='not a tokenizer.json') as raised:
    Tokenizer.from_folder(folder)
  assert str(path) in str(raised.value)
  path.unlink()
  with pytest.raises(FileNotFoundError, match='tokenizer.json'):
    Tokenizer.from_folder(folder)
  shutil.copy(TINY / 'tokenizer.json', folder)
  (folder / 'tokenizer_config.json').write_text('[]')
  with pytest.raises(ValueError, match=r'tokenizer_config\.json: not a JSON o'):
    Tokenizer.from_folder(folder)
  (folder / 'tokenizer_config.json').write_text('{')
  with pytest.raises(ValueError, match=r'tokenizer_config\.json: not JSON'):
    Tokenizer.from_folder(folder)


def test_a_sentencepiece_vocabulary_has_the_reference_ids(tmp_path):
  path = write_gguf(DATA / 'llama2', tmp_path / 'm.gguf', tokenizer='llama')
  tokenizer = Tokenizer.from_gguf(path)
  expected = json.loads((DATA / 'tiny_sentencepiece.json').read_text())
  for entry in expected['strings']:
    assert tokenizer.encode(entry['text']) == entry['ids'], entry['text']
    text = tokenizer.decode(entry['ids'])
    assert text == entry['without_special']
    whole = tokenizer.decode(entry['ids'], skip_special_tokens=False)
    assert whole == entry['decoded']
    ids = tokenizer.encode(entry['text'], add_special_tokens=False)
    told = b''.join(map(tokenizer.token_bytes, ids)).decode()
    assert text.strip() in told


def test_an_unknown_gguf_vocabulary_is_named(tmp_path):
  path = tmp_path / 'model.gguf'
  write_gguf(DATA / 'llama2', path, tokenizer='t5')
  with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model='t5'"):
    Tokenizer.from_gguf(path)


def test_a_gguf_merge_of_no_tokens_is_named(tmp_path):
  path = tmp_path / 'model.gguf'
  whole = write_gguf(DATA / 'llama2', path).read_bytes()
  path.write_bytes(whole.replace('Ġ t'.encode(), 'Ġ !'.encode(), 1))
  with pytest.raises(ValueError, match=r"merges has 'Ġ !'"):
    Tokenizer.from_gguf(path)


def test_others_go_on_while_a_long_text_becomes_tokens(case):
  tokenizer, _ = case
  over, turns = threading.Event(), []

  def turn() -> None:
    while not over.wait(0.001):
      turns.append(time.perf_counter())

  thread = threading.Thread(target=turn)
  thread.start()
  begun_s = time.perf_counter()
  tokenizer.encode('word and ' * 50_000)
  ended_s = time.perf_counter()
  over.set()
  thread.join()
  # Whoever holds the interpreter gives it away once, when it is done.
  assert sum(begun_s < at < ended_s for at in turns) >= 10

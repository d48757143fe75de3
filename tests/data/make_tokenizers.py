# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Makes what the reference implementation says of two tiny tokenizers.

Run once, in an environment of its own:

  pip install transformers==5.24.0 sentencepiece
  python tests/data/make_tokenizers.py
  python tests/data/make_tokenizers.py --smollm2 models/smollm2-135m

The first leaves tiny_tokenizer/ (byte-level BPE, with a chat template) and
tiny_sentencepiece.json (tokens, scores and types as GGUF holds them), the
second smollm2_tokens.json. Each has the ids of awkward strings.
"""

import argparse
import io
import json
from pathlib import Path
import tempfile

import sentencepiece
import tokenizers
from tokenizers import decoders
from tokenizers import pre_tokenizers
from tokenizers import trainers
import transformers

HERE = Path(__file__).resolve().parent
CHATS = (
  [{'role': 'user', 'content': 'Write a short story about a red fox.'}],
  [
    {'role': 'system', 'content': 'You answer like a pirate.'},
    {'role': 'user', 'content': 'How do I boil an egg?'},
  ],
  [
    {'role': 'user', 'content': 'What is a cache?'},
    {'role': 'assistant', 'content': 'A small, fast store of recent data.'},
    {'role': 'user', 'content': 'Why does it help? Give three reasons.'},
  ],
)
STRINGS = (
  '',
  ' ',
  'Hello, world!',
  '  two  spaces and a tab\t.\n\n\nthree line breaks \n',
  'numbers 1234567890 and 3.14159, 1e-5',
  "it's we'll I'd they're 'quoted' IT'S",
  'naïve café déjà vu, Straße, Ελληνικά, русский',
  '日本語のテキスト 中文 한국어',
  'emoji 🙂👩‍👩‍👧 and a flag 🇫🇷',
  'combining e\u0301 against \u00e9, zero\u200bwidth, nbsp\u00a0here',
  '<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_end',
  'def f(x):\n    return x**2  # "code"\r\n\ttabs',
  'a' * 70 + ' ' * 9 + '!?!?;;;---___',
  '\ufeffbom \x00nul \x7fdel \u2028ls',
)
CHAT_TEMPLATE = (
  "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
  "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
  "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
  '{% endfor %}'
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRAINING = [str(__doc__), CHAT_TEMPLATE, *STRINGS, str(CHATS)]


def make_byte_level() -> None:
  """A byte-level BPE of 400 tokens, trained on TRAINING."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  backend.decoder = decoders.ByteLevel()
  backend.train_from_iterator(
    TRAINING,
    trainers.BpeTrainer(
      vocab_size=400,
      special_tokens=['<|endoftext|>', '<|im_start|>', '<|im_end|>'],
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  folder = HERE / 'tiny_tokenizer'
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    bos_token='<|im_start|>',
    eos_token='<|im_end|>',
    chat_template=CHAT_TEMPLATE,
  )
  tokenizer.save_pretrained(folder)
  record_tokens(folder, folder / 'expected.json')


def record_tokens(model: Path, out: Path) -> None:
  """What transformers' tokenizer says of awkward strings and of chats."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(model)
  strings = record_strings(tokenizer)
  chats = []
  for messages in CHATS:
    text, ids = chat(tokenizer, messages)
    chats.append({'messages': messages, 'text': text, 'ids': ids})
  write_json(out, {'strings': strings, 'chats': chats})


def record_strings(tokenizer) -> list[dict]:
  strings = []
  for text in STRINGS:
    ids = tokenizer(text)['input_ids']
    whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    short = tokenizer.decode(
      ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    strings.append(
      {
        'text': text,
        'ids': ids,
        'decoded': whole,
        'without_special': short,
      }
    )
  return strings


def chat(tokenizer, messages) -> tuple[str, list[int]]:
  text = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=False
  )
  return text, tokenizer(text, add_special_tokens=False)['input_ids']


def make_sentencepiece() -> None:
  """A sentencepiece BPE as Llama 2's, 480 pieces with bytes to fall back on."""
  model = io.BytesIO()
  lines = [line for text in TRAINING for line in text.split('\n') if line]
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines),
    model_writer=model,
    model_type='bpe',
    vocab_size=480,
    byte_fallback=True,
    split_digits=True,
    remove_extra_whitespaces=False,
    normalization_rule_name='identity',
    character_coverage=0.99,
    minloglevel=2,
  )
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / 'tokenizer.model'
    path.write_bytes(model.getvalue())
    tokenizer = transformers.LlamaTokenizer.from_pretrained(
      folder, vocab_file=str(path), add_bos_token=True
    )
  pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
  ids = range(pieces.get_piece_size())
  value = {
    'tokens': [pieces.id_to_piece(i) for i in ids],
    'scores': [pieces.get_score(i) for i in ids],
    'types': [token_type(pieces, i) for i in ids],
    'strings': record_strings(tokenizer),
  }
  write_json(HERE / 'tiny_sentencepiece.json', value)


def token_type(pieces, i: int) -> int:
  """As GGUF writes it: 2 unknown, 3 control, 6 byte, 1 normal."""
  if pieces.is_unknown(i):
    return 2
  if pieces.is_control(i):
    return 3
  return 6 if pieces.is_byte(i) else 1


def write_json(path: Path, entries: dict[str, list] | list) -> None:
  """One entry a line: small, and a change of it can be read."""
  if isinstance(entries, dict):
    lists = [f'"{name}": {_lines(found)}' for name, found in entries.items()]
    text = '{' + ',\n'.join(lists) + '}'
  else:
    text = _lines(entries)
  path.write_text(text + '\n')


def _lines(entries: list) -> str:
  if not isinstance(entries[0], dict):
    return json.dumps(entries)
  return '[\n' + ',\n'.join(json.dumps(entry) for entry in entries) + '\n]'


def main() -> None:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('--smollm2', type=Path, metavar='FOLDER')
  args = parser.parse_args()
  if args.smollm2:
    record_tokens(args.smollm2, HERE / 'smollm2_tokens.json')
    return
  make_byte_level()
  make_sentencepiece()


if __name__ == '__main__':
  main()

# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Makes tests/data: what the reference implementation says of tiny models.

Run once, in an environment of its own (the tests need neither torch nor
transformers):

  pip install torch==2.13.0 transformers==5.24.0 safetensors
  python tests/data/make_goldens.py             # FAMILY/ and tiny_tokenizer/
  python tests/data/make_goldens.py --smollm2 models/smollm2-135m

Each FAMILY folder is a random checkpoint as `save_pretrained` writes it, and
golden.npz: `tokens` int32 [40], `logits` float32 [40, V] of all positions,
`greedy` int32 [16] that follow, `gap` float32 [16] between their top-2 logits.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
NUM_TOKENS = 40
NUM_GREEDY = 16
SIZES = {
  'vocab_size': 96,
  'hidden_size': 64,
  'intermediate_size': 64,
  'num_hidden_layers': 2,
  'num_attention_heads': 8,
  'max_position_embeddings': 128,
  'bos_token_id': 1,
  'eos_token_id': 2,
}
# Wavelengths of 16-wide heads are 6, 20, 63, 199, ... tokens: kept, kept,
# interpolated, stretched.
LLAMA3_ROPE = {
  'rope_type': 'llama3',
  'rope_theta': 10000.0,
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 128,
}
LINEAR_ROPE = {'rope_type': 'linear', 'rope_theta': 10000.0, 'factor': 4.0}
FAMILIES = {
  'llama2': ('Llama', {'num_key_value_heads': 8}),
  'llama3': (
    'Llama',
    {
      'num_key_value_heads': 2,
      'head_dim': 16,
      'tie_word_embeddings': True,
      'rope_parameters': LLAMA3_ROPE,
      'max_position_embeddings': 1024,
    },
  ),
  'llama_linear': (
    'Llama',
    {
      'num_key_value_heads': 4,
      'rope_parameters': LINEAR_ROPE,
    },
  ),
  'llama_9_3': (
    'Llama',
    {
      'num_attention_heads': 9,
      'num_key_value_heads': 3,
      'hidden_size': 72,
      'intermediate_size': 72,
      'tie_word_embeddings': True,
    },
  ),
  'qwen2': (
    'Qwen2',
    {
      'num_key_value_heads': 4,
      'tie_word_embeddings': True,
      'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6},
    },
  ),
  'qwen3': (
    'Qwen3',
    {
      'num_key_value_heads': 2,
      'head_dim': 16,
      'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6},
    },
  ),
  'mistral': (
    'Mistral',
    {
      'num_key_value_heads': 4,
      'head_dim': 8,
      'sliding_window': 12,
    },
  ),
}
PROMPTS = (
  'The three laws of thermodynamics state that',
  'def fibonacci(n):\n  """Returns the n-th Fibonacci number."""\n',
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


def random_model(kind: str, seed: int, **sizes) -> torch.nn.Module:
  """A float32 model whose every parameter matters: no zeros, no ones."""
  config = getattr(transformers, f'{kind}Config')(**{**SIZES, **sizes})
  model = getattr(transformers, f'{kind}ForCausalLM')(config).eval()
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, weight in model.named_parameters():
      noise = torch.randn(weight.shape, generator=generator)
      if 'norm' in name:
        weight.copy_(1 + 0.3 * noise)
      elif name.endswith('bias'):
        weight.copy_(0.5 * noise)
      else:
        fan_in = weight.shape[1]
        weight.copy_(1.5 * fan_in**-0.5 * noise)
  return model


@torch.no_grad()
def greedy(model, tokens: list[int], count: int):
  """The `count` likeliest next tokens and the gap to the second likeliest."""
  out, gaps = [], []
  for _ in range(count):
    logits = model(torch.tensor([tokens + out])).logits[0, -1]
    first, second = torch.topk(logits, 2).values
    gaps.append(float(first - second))
    out.append(int(logits.argmax()))
  return out, gaps


@torch.no_grad()
def make_family(name: str, seed: int) -> None:
  kind, sizes = FAMILIES[name]
  model = random_model(kind, seed, **sizes)
  folder = HERE / name
  model.save_pretrained(folder)
  (folder / 'generation_config.json').unlink(missing_ok=True)
  (folder / 'model.safetensors').chmod(0o644)
  tokens = np.random.default_rng(seed).integers(3, 96, NUM_TOKENS)
  logits = model(torch.tensor(tokens[None])).logits[0].numpy()
  following, gaps = greedy(model, tokens.tolist(), NUM_GREEDY)
  np.savez(
    folder / 'golden.npz',
    tokens=tokens.astype(np.int32),
    logits=logits.astype(np.float32),
    greedy=np.array(following, np.int32),
    gap=np.array(gaps, np.float32),
  )
  print(name, f'logits +-{logits.std():.2f}, least gap {min(gaps):.4f}')


CHAT_TEMPLATE = (
  "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
  "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
  "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
  '{% endfor %}'
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> None:
  """A byte-level BPE of 400 tokens, trained on the texts above."""
  import tokenizers
  from tokenizers import decoders
  from tokenizers import pre_tokenizers
  from tokenizers import trainers

  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  backend.decoder = decoders.ByteLevel()
  backend.train_from_iterator(
    [__doc__, CHAT_TEMPLATE, *STRINGS, str(PROMPTS)],
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
  chats = []
  for messages in PROMPTS[2:]:
    text, ids = chat(tokenizer, messages)
    chats.append({'messages': messages, 'text': text, 'ids': ids})
  write_json(out, {'strings': strings, 'chats': chats})


def chat(tokenizer, messages) -> tuple[str, list[int]]:
  text = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=False
  )
  return text, tokenizer(text, add_special_tokens=False)['input_ids']


def make_smollm2(folder: Path) -> None:
  """Greedy tokens of the converted SmolLM2, and its tokenizer's."""
  record_tokens(folder, HERE / 'smollm2_tokens.json')
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
  answers = []
  for prompt in PROMPTS:
    if isinstance(prompt, str):
      ids = tokenizer(prompt)['input_ids']
    else:
      _, ids = chat(tokenizer, prompt)
    tokens = generate(model, ids)
    _, gaps = greedy(model, ids, len(tokens))
    answers.append(
      {
        'prompt': prompt,
        'prompt_ids': ids,
        'tokens': tokens,
        'text': tokenizer.decode(tokens),
        'gaps': [round(gap, 4) for gap in gaps],
      }
    )
    print(f'least gap {min(gaps):.4f}', repr(answers[-1]['text']))
  write_json(HERE / 'smollm2_greedy.json', answers)


def generate(model, ids: list[int]) -> list[int]:
  """40 greedy tokens by the library's own loop, end tokens or not."""
  model.generation_config.eos_token_id = None
  out = model.generate(
    torch.tensor([ids]),
    max_new_tokens=40,
    do_sample=False,
    attention_mask=torch.ones(1, len(ids), dtype=torch.long),
  )
  return out[0, len(ids) :].tolist()


def write_json(path: Path, entries: dict[str, list] | list) -> None:
  """One entry a line: small, and a change of it can be read."""
  if isinstance(entries, dict):
    lists = [f'"{name}": {_lines(found)}' for name, found in entries.items()]
    text = '{' + ',\n'.join(lists) + '}'
  else:
    text = _lines(entries)
  path.write_text(text + '\n')


def _lines(entries: list) -> str:
  return '[\n' + ',\n'.join(json.dumps(entry) for entry in entries) + '\n]'


def main() -> None:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('--smollm2', type=Path, metavar='FOLDER')
  args = parser.parse_args()
  if args.smollm2:
    make_smollm2(args.smollm2)
    return
  for seed, name in enumerate(FAMILIES):
    make_family(name, seed)
  make_tokenizer()


if __name__ == '__main__':
  main()

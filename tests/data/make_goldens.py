# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Makes tests/data: what the reference implementation says of tiny models.

Run once, in an environment of its own (the tests need neither torch nor
transformers):

  pip install torch==2.13.0 transformers==5.24.0 safetensors
  python tests/data/make_goldens.py                  # every FAMILY/
  python tests/data/make_goldens.py --smollm2 models/smollm2-135m

Each FAMILY folder is a random checkpoint as `save_pretrained` writes it, and
golden.npz: `tokens` int32 [40], `logits` float32 [40, V] of all positions,
`greedy` int32 [16] that follow, `gap` float32 [16] between their top-2 logits.
"""

import argparse
from pathlib import Path

import make_tokenizers
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
  *make_tokenizers.CHATS,
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


def make_smollm2(folder: Path) -> None:
  """Greedy tokens of the converted SmolLM2."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
  answers = []
  for prompt in PROMPTS:
    if isinstance(prompt, str):
      ids = tokenizer(prompt)['input_ids']
    else:
      _, ids = make_tokenizers.chat(tokenizer, prompt)
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
  make_tokenizers.write_json(HERE / 'smollm2_greedy.json', answers)


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


def main() -> None:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('--smollm2', type=Path, metavar='FOLDER')
  args = parser.parse_args()
  if args.smollm2:
    make_smollm2(args.smollm2)
    return
  for seed, name in enumerate(FAMILIES):
    make_family(name, seed)


if __name__ == '__main__':
  main()

# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode by transformers on torch, in an environment of its own.

python scripts/peers/transformers_turns.py '{"threads": 1, "config": {...}}'

Random weights of the shape in `config`, a Hugging Face config.json, float32.
"""

import json
import sys

from turns import Child  # of this folder


def main(threads: int, config: dict) -> None:
  child = Child(threads)
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  torch.set_num_threads(threads)
  torch.manual_seed(0)
  model_config = transformers.LlamaConfig(**config)
  model = transformers.LlamaForCausalLM(model_config).eval()

  @torch.inference_mode()
  def prefill(tokens: int) -> None:
    ids = torch.arange(tokens)[None] % model_config.vocab_size
    model(input_ids=ids, use_cache=True, logits_to_keep=1)

  caches = {}

  @torch.inference_mode()
  def decode(batch: int, context: int, steps: int) -> None:
    key = batch, context
    if key not in caches:
      caches[key] = random_cache(*key)
    cache = caches[key]
    if over := cache.get_seq_length() - context:
      cache.crop(-over)  # the last turn's tokens
    ids = torch.ones(batch, 1, dtype=torch.long)
    for _ in range(steps):
      logits = model(input_ids=ids, past_key_values=cache).logits
      ids = logits[:, -1].argmax(-1, keepdim=True)

  def random_cache(batch: int, context: int):
    cache = transformers.DynamicCache()
    heads = model_config.num_key_value_heads
    for layer in range(model_config.num_hidden_layers):
      shape = (batch, heads, context, model_config.head_dim)
      cache.update(torch.randn(shape), torch.randn(shape), layer)
    return cache

  version = f'transformers {transformers.__version__}, torch'
  works = {'prefill': prefill, 'decode': decode}
  child.answer(works, f'{version} {torch.__version__}')


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))

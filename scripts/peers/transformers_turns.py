# SPDX-License-Identifier: Apache-2.0
"""Prefill by transformers on torch; runs in the peer's own environment.

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

  version = f'transformers {transformers.__version__}, torch'
  child.answer({'prefill': prefill}, f'{version} {torch.__version__}')


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))

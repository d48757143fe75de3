# SPDX-License-Identifier: Apache-2.0
"""Prefill by vLLM on a CPU; runs in the peer's own environment.

python scripts/peers/vllm_turns.py '{"threads": 1, "config": {...}}'

Random weights of the shape in `config`, a Hugging Face config.json, float32,
eager, in this one process.
"""

import json
import os
from pathlib import Path
import sys
import tempfile

from turns import Child  # of this folder


def main(threads: int, config: dict) -> None:
  child = Child(threads)
  os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] = '0'  # its CPU time counts
  os.environ['VLLM_CPU_OMP_THREADS_BIND'] = f'0-{threads - 1}'
  os.environ['VLLM_CPU_KVCACHE_SPACE'] = '1'  # GiB
  import vllm  # pyright: ignore[reportMissingImports]

  with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / 'config.json').write_text(json.dumps(config))
    llm = vllm.LLM(
      folder,
      load_format='dummy',
      skip_tokenizer_init=True,
      dtype='float32',
      max_num_seqs=1,
      max_num_batched_tokens=config['max_position_embeddings'],
      max_model_len=config['max_position_embeddings'],
      enable_prefix_caching=False,
      enforce_eager=True,
    )
  one = vllm.SamplingParams(max_tokens=1, detokenize=False)

  def prefill(tokens: int) -> None:
    prompt = {'prompt_token_ids': list(range(3, 3 + tokens))}
    llm.generate(prompt, one, use_tqdm=False)

  child.answer({'prefill': prefill}, f'vllm {vllm.__version__}')


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))

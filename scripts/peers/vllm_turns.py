# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode by vLLM on a CPU; runs in the peer's own environment.

python scripts/peers/vllm_turns.py '{"threads": 1, "config": {...}}'

Random weights of the shape in `config`, a Hugging Face config.json, float32,
eager, in this one process.
"""

import itertools
import json
import os
from pathlib import Path
import sys
import tempfile

from turns import Child  # of this folder

MOST_ROWS = 8


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
      max_num_seqs=MOST_ROWS,
      max_num_batched_tokens=config['max_position_embeddings'],
      max_model_len=config['max_position_embeddings'],
      enable_prefix_caching=False,
      enforce_eager=True,
    )
  numbers = itertools.count()
  one = vllm.SamplingParams(max_tokens=1, detokenize=False)

  def prefill(tokens: int) -> None:
    prompt = {'prompt_token_ids': list(range(3, 3 + tokens))}
    llm.generate(prompt, one, use_tqdm=False)

  def decode(batch: int, context: int, steps: int) -> dict[str, float]:
    engine = llm.llm_engine
    several = vllm.SamplingParams(
      temperature=0, ignore_eos=True, max_tokens=steps + 2, detokenize=False
    )
    ids = [f'{next(numbers)}' for _ in range(batch)]
    for request_id in ids:
      prompt = {'prompt_token_ids': list(range(3, 2 + context))}
      engine.add_request(request_id, prompt, several)
    waiting = set(ids)
    while waiting:  # prefill is not timed
      waiting -= {output.request_id for output in engine.step()}
    taken = child.timed(lambda: [engine.step() for _ in range(steps)])
    engine.abort_request(ids)
    return taken

  works = {'prefill': prefill, 'decode': decode}
  child.answer(works, f'vllm {vllm.__version__}')


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))

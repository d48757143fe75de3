# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode by llama.cpp; runs in the peer's own environment.

python scripts/peers/llama_cpp_turns.py '{"threads": 1, "config": {...}}'

Random weights of the shape in `config`, a Hugging Face config.json, float32, as
is its KVCache.
"""

import ctypes
import json
from pathlib import Path
import sys
import tempfile

from turns import Child  # of this folder

MOST_ROWS = 8
BATCH_TOKENS = 512


def main(threads: int, config: dict) -> None:
  child = Child(threads)
  import llama_cpp  # pyright: ignore[reportMissingImports]
  import numpy as np

  llama_cpp.llama_backend_init()
  quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
  llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / 'model.gguf'
    write_random(path, config)
    about = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), about)
    assert model, 'llama.cpp does not load what was written for it'
  sizes = llama_cpp.llama_context_default_params()
  sizes.n_ctx = config['max_position_embeddings']
  sizes.n_batch = sizes.n_ubatch = BATCH_TOKENS
  sizes.n_seq_max = MOST_ROWS
  sizes.n_threads = sizes.n_threads_batch = threads
  sizes.type_k = sizes.type_v = llama_cpp.GGML_TYPE_F32
  sizes.kv_unified = True
  context_of = llama_cpp.llama_init_from_model(model, sizes)
  assert context_of, 'llama.cpp makes no context'
  memory = llama_cpp.llama_get_memory(context_of)
  batch_of = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
  vocab = config['vocab_size']

  def run(entries: list[tuple[int, int, int, bool]]) -> None:
    """Computes (token, position, row, whether its logits are asked for)."""
    batch_of.n_tokens = len(entries)
    for i, (token, position, row, wanted) in enumerate(entries):
      batch_of.token[i], batch_of.pos[i] = token, position
      batch_of.n_seq_id[i], batch_of.seq_id[i][0] = 1, row
      batch_of.logits[i] = wanted
    assert not llama_cpp.llama_decode(context_of, batch_of)

  def fill(row: int, tokens: int) -> None:
    for start in range(0, tokens, BATCH_TOKENS):
      stop = min(start + BATCH_TOKENS, tokens)
      span = range(start, stop)
      run([(3 + i % 1000, i, row, i == tokens - 1) for i in span])
      llama_cpp.llama_synchronize(context_of)

  def best(i: int) -> int:
    logits = llama_cpp.llama_get_logits_ith(context_of, i)
    return int(np.ctypeslib.as_array(logits, (vocab,)).argmax())

  def prefill(tokens: int) -> None:
    llama_cpp.llama_memory_clear(memory, True)
    held.clear()
    fill(0, tokens)
    best(-1)

  held: list[tuple[int, int]] = []  # the case whose KVCache is there

  def decode(batch: int, context: int, steps: int) -> dict[str, float]:
    if held != [(batch, context)]:
      llama_cpp.llama_memory_clear(memory, True)
      for row in range(batch):
        fill(row, context)
      held[:] = [(batch, context)]
    for row in range(batch):
      llama_cpp.llama_memory_seq_rm(memory, row, context, -1)
    return child.timed(lambda: step_all(batch, context, steps))

  def step_all(batch: int, context: int, steps: int) -> None:
    tokens = [3] * batch
    for step in range(steps):
      run([(tokens[r], context + step, r, True) for r in range(batch)])
      tokens = [best(r) for r in range(batch)]

  works = {'prefill': prefill, 'decode': decode}
  child.answer(works, f'llama-cpp-python {llama_cpp.__version__}')


def write_random(path: Path, config: dict) -> None:
  """A model of random weights without a vocabulary."""
  import gguf
  import numpy as np

  writer = gguf.GGUFWriter(path, 'llama')
  heads, kv_heads = config['num_attention_heads'], config['num_key_value_heads']
  width, mlp = config['hidden_size'], config['intermediate_size']
  head = config.get('head_dim') or width // heads
  writer.add_context_length(config['max_position_embeddings'])
  writer.add_embedding_length(width)
  writer.add_feed_forward_length(mlp)
  writer.add_block_count(config['num_hidden_layers'])
  writer.add_head_count(heads)
  writer.add_head_count_kv(kv_heads)
  writer.add_key_length(head)
  writer.add_value_length(head)
  writer.add_layer_norm_rms_eps(config['rms_norm_eps'])
  writer.add_vocab_size(config['vocab_size'])
  writer.add_tokenizer_model('no_vocab')
  shapes = {
    'attn_q': (heads * head, width),
    'attn_k': (kv_heads * head, width),
    'attn_v': (kv_heads * head, width),
    'attn_output': (width, heads * head),
    'ffn_gate': (mlp, width),
    'ffn_up': (mlp, width),
    'ffn_down': (width, mlp),
    'attn_norm': (width,),
    'ffn_norm': (width,),
  }
  rng = np.random.default_rng(0)
  every = {
    f'blk.{layer}.{name}.weight': shape
    for layer in range(config['num_hidden_layers'])
    for name, shape in shapes.items()
  }
  every['token_embd.weight'] = config['vocab_size'], width
  every['output_norm.weight'] = (width,)
  for name, shape in every.items():
    values = rng.standard_normal(shape, np.float32) * 0.02
    writer.add_tensor(name, np.ones(shape, 'f4') if 'norm' in name else values)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))

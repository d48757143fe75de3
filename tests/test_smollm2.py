# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M writes what the reference implementation writes.

`python tests/data/make_goldens.py --smollm2 models/smollm2-135m` recorded 40
greedy tokens after each of 5 prompts, all with a top-2 gap above 1e-3.
"""

import json
from pathlib import Path

from jax import numpy as jnp
import numpy as np
import pytest

from mooncake_jax.model.checkpoints.load import load_model
from mooncake_jax.model.decode import decode_step
from mooncake_jax.model.decode import DecodeState
from mooncake_jax.model.pages import init_pool
from mooncake_jax.model.params import Params
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model.tokenizer import Tokenizer
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Sampling

DATA = Path(__file__).parent / 'data'
FOLDER = Path(__file__).resolve().parents[1] / 'models' / 'smollm2-135m'
PAGE_TOKENS = 16
PAGES_A_ROW = 8
BUCKET = 64
EXPECTED = json.loads((DATA / 'smollm2_greedy.json').read_text())

pytestmark = pytest.mark.skipif(
  not (FOLDER / 'config.json').is_file(),
  reason=f'no {FOLDER}: scripts/get_model.py smollm2-135m fetches it',
)


@pytest.fixture(scope='module')
def model() -> tuple[ModelConfig, Params]:
  return load_model(FOLDER)


def tables() -> np.ndarray:
  """Pages [B, P] of every prompt."""
  rows = len(EXPECTED)
  pages = np.arange(1, 1 + rows * PAGES_A_ROW, dtype=np.int32)
  return pages.reshape(rows, PAGES_A_ROW)


def prefill(params, config, kv, prompt, table_P):
  """The first token after a prompt, in chunks of one bucket."""
  token = None
  for start in range(0, len(prompt), BUCKET):
    piece = prompt[start : start + BUCKET]
    tokens_T = np.zeros(BUCKET, np.int32)
    tokens_T[: len(piece)] = piece
    report_R, _, kv = prefill_chunk(
      params,
      config,
      kv,
      tokens_T,
      table_P,
      np.int32(start),
      np.int32(len(piece)),
      SamplingRows.of([Sampling()]),
    )
    token = report_R[0]
  return token, kv


def test_prompts_have_the_reference_ids():
  tokenizer = Tokenizer.from_folder(FOLDER)
  for entry in EXPECTED:
    prompt = entry['prompt']
    if isinstance(prompt, str):
      assert tokenizer.encode(prompt) == entry['prompt_ids']
    else:
      assert tokenizer.encode_chat(prompt) == entry['prompt_ids']
    text = tokenizer.decode(entry['tokens'], skip_special_tokens=False)
    assert text == entry['text']


def test_greedy_tokens_are_the_reference_tokens(model):
  config, params = model
  rows = len(EXPECTED)
  kv = init_pool(config, 1 + rows * PAGES_A_ROW, PAGE_TOKENS, jnp.float32)
  first = []
  for entry, table_P in zip(EXPECTED, tables()):
    token, kv = prefill(params, config, kv, entry['prompt_ids'], table_P)
    first.append(token)
  state = DecodeState(
    tokens_B=jnp.stack(first),
    positions_B=np.array([len(e['prompt_ids']) for e in EXPECTED], np.int32),
    active_B=np.ones(rows, bool),
    page_table_BP=tables(),
    sampling=SamplingRows.of([Sampling()] * rows),
  )
  steps = [state.tokens_B]
  for _ in range(len(EXPECTED[0]['tokens']) - 1):
    state, _, kv = decode_step(params, config, kv, state)
    steps.append(state.tokens_B)
  drawn_BT = np.stack([np.asarray(tokens) for tokens in steps], axis=1)
  for entry, tokens in zip(EXPECTED, drawn_BT.tolist()):
    assert tokens == entry['tokens'], entry['prompt']

# SPDX-License-Identifier: Apache-2.0
"""Azure, BurstGPT, Bailian and client mixes: read, refused, served."""

from dataclasses import replace
import json
import os
from pathlib import Path

import numpy as np
import pytest

from lifecycle import MODEL
from mooncake_jax.workload.bailian import load_bailian
from mooncake_jax.workload.clients import client_mix
from mooncake_jax.workload.clients import ClientMix
from mooncake_jax.workload.csv_traces import load_azure
from mooncake_jax.workload.csv_traces import load_burstgpt
from mooncake_jax.workload.statistics import trace_statistics
from mooncake_jax.workload.tokens import to_requests
from mooncake_jax.workload.tokens import TokenMaker
from mooncake_jax.workload.trace import TraceRow
from scripts.config import load
from scripts.experiment import Experiment
from scripts.gin_source import ROOT
from scripts.serving import backends
from scripts.serving import prepare
from scripts.serving import serve_once
from scripts.workloads import from_file
from scripts.workloads import published
from scripts.workloads import TRACES
from scripts.workloads import TraceWorkload
from tiny_experiment import tiny

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,1396,109
"""
BURSTGPT = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total \
tokens,Log Type
5,,3.5,ChatGPT,472,18,490,Conversation log
45,7,9,GPT-4,1087,230,1317,Conversation log
46,,0.1,ChatGPT,12,0,12,API log
"""


def bailian(**changes) -> str:
  fields = {
    'chat_id': 159,
    'parent_chat_id': -1,
    'timestamp': 61.114,
    'input_length': 40,
    'output_length': 132,
    'type': 'text',
    'turn': 1,
    'hash_ids': [1089, 1090, 7],
  }
  return json.dumps({**fields, **changes}) + '\n'


def written(folder: Path, text: str) -> Path:
  path = folder / 'trace'
  path.write_text(text, newline='')
  return path


def test_azure_rows_begin_at_zero_and_share_nothing(tmp_path):
  rows, errors = load_azure(written(tmp_path, AZURE))
  assert not errors
  assert rows == [
    TraceRow(0.0, 374, 44, (0,), hashed=False),
    TraceRow(4.314579, 1396, 109, (1, 2, 3), hashed=False),
  ]


def test_burstgpt_rows_are_those_that_were_answered(tmp_path):
  path = written(tmp_path, BURSTGPT)
  rows, errors = load_burstgpt(path)
  assert errors == [f'{path}: 1 requests with 0 tokens (they failed)']
  assert rows == [
    TraceRow(0.0, 472, 18, (0,), hashed=False),
    TraceRow(40.0, 1087, 230, (1, 2, 3), hashed=False),
  ]


def test_bailian_rows_share_blocks_of_sixteen_tokens(tmp_path):
  text = bailian() + bailian(input_length=48, timestamp=62)
  text += bailian(hash_ids=[1089, 1090])  # The tail of 8 tokens has no id.
  rows, errors = load_bailian(written(tmp_path, text))
  assert not errors
  assert rows == [
    TraceRow(61.114, 40, 132, (1089, 1090, 7)),
    TraceRow(62, 48, 132, (1089, 1090, 7)),
    TraceRow(61.114, 40, 132, (1089, 1090, 1091)),
  ]
  read = from_file(str(tmp_path / 'trace'), 'bailian')
  prepared = TraceWorkload(read).prepare(
    tiny().model, MODEL, replace(tiny().cluster, block_size_tokens=16), False
  )
  first, last, second = (r.block_keys for r in prepared.requests)
  assert first == last == second[:2] and len(second) == 3


@pytest.mark.parametrize(
  ('load_it', 'good', 'bad', 'message'),
  [
    (load_azure, AZURE, 'soon,374,44', "TIMESTAMP='soon' must be a date"),
    (
      load_azure,
      AZURE,
      '2023-11-16,,44',
      "ContextTokens='' must be an integer",
    ),
    (
      load_azure,
      AZURE,
      '2023-11-16 18:15:46,3.5,44',
      "ContextTokens='3.5' must be an integer >= 1",
    ),
    (load_azure, AZURE, '2023-11-16 18:15:46,3,0', "GeneratedTokens='0' must"),
    (
      load_azure,
      AZURE,
      '2023-11-16 18:15:46,3',
      '2 cells but the header has 3',
    ),
    (load_burstgpt, BURSTGPT, '-5,,,m,1,1,2,t', "Timestamp='-5' must be a num"),
    (load_burstgpt, BURSTGPT, 'nan,,,m,1,1,2,t', "Timestamp='nan' must be a"),
    (load_burstgpt, BURSTGPT, '5,,,m,1_0,1,2,t', "Request tokens='1_0' must"),
    (
      load_azure,
      AZURE,
      f'2023-11-16 18:15:46,{"9" * 5000},1',
      "ContextTokens='999.* must be an integer >= 1 and below 2147483648",
    ),
    (load_bailian, bailian(), bailian(hash_ids=[1]), r'len\(hash_ids\)=1 but'),
    (load_bailian, bailian(), bailian(timestamp='x'), "timestamp='x' must be"),
    (load_bailian, bailian(), bailian(output_length=0), 'output_length=0 must'),
    (load_bailian, bailian(), '{"timestamp": 1}', 'chat_id is missing'),
    (load_bailian, bailian(), '5,ChatGPT,472', 'not JSON'),
  ],
)
def test_a_bad_line_costs_itself_alone_and_is_named(
  tmp_path, load_it, good, bad, message
):
  path = written(tmp_path, good + bad + '\n')
  rows, errors = load_it(path)
  whole, others = load_it(written(tmp_path, good))
  assert rows == whole
  (error,) = [e for e in errors if e not in others]
  line = good.count('\n') + 1
  assert error.startswith(f'{path}:{line}: ') and '\n' not in error
  with pytest.raises(ValueError, match=message):
    raise ValueError(error)


@pytest.mark.parametrize(
  ('text', 'trace_format', 'message'),
  [
    (AZURE, 'burstgpt', 'trace:1: Timestamp is missing, found'),
    (BURSTGPT, 'azure', 'trace:1: TIMESTAMP is missing, found'),
    ('', 'azure', 'trace:1: TIMESTAMP is missing, found'),
    (AZURE + 'x' * 200_000, 'azure', 'trace:4: not CSV: field larger than'),
    (AZURE, 'mooncake', "no.* trace in format 'mooncake': .*trace:1: not JSON"),
    (
      bailian(),
      'mooncake',
      "format 'mooncake': .*hash_ids.=3 but input_length",
    ),
    (AZURE, 'bailian', "not a trace in format 'bailian'"),
  ],
)
def test_a_file_of_another_format_is_refused(
  tmp_path, text, trace_format, message
):
  with pytest.raises(ValueError, match=message):
    from_file(str(written(tmp_path, text)), trace_format)


def test_what_shares_nothing_known_has_no_hit_rate(tmp_path):
  read = from_file(str(written(tmp_path, AZURE)), 'azure')
  assert trace_statistics(read.rows).hit_rate is None
  spec = replace(tiny().cluster, decode_pool_tokens=8192)
  spec = replace(spec, prefill_pool_tokens=8192, request_timeout_s=1e6)
  model = replace(tiny().model, config=replace(MODEL, max_tokens=4096))
  experiment = tiny(
    backend='virtual', workload=TraceWorkload(read), cluster=spec, model=model
  )
  config = model.read_config()
  with backends(experiment, config) as make_backend:
    prepared = prepare(experiment, config)
    outcome = serve_once(experiment, config, prepared, make_backend())
  summary = outcome.summary
  assert summary.completed == 2
  assert (summary.hit_rate, summary.hit_rate_request_mean) == (None, None)
  assert summary.hit_rate_by_tier == {}


def test_prompts_of_a_trace_without_hashes_differ_on_devices(tmp_path):
  rows, _ = load_azure(written(tmp_path, AZURE))
  first, second = to_requests(
    rows, block_size_tokens=16, maker=TokenMaker(vocab_size=512)
  )
  assert first.prompt is not None and second.prompt is not None
  assert len(first.prompt) == 374 and len(second.prompt) == 1396
  assert not set(first.block_keys) & set(second.block_keys)
  assert not first.reuse_known


@pytest.mark.skipif(TRACES not in os.environ, reason=f'needs {TRACES}')
@pytest.mark.parametrize(
  ('name', 'requests', 'inputs', 'outputs'),
  [
    ('AzureLLMInferenceTrace_conv.csv', 19_366, 1154.7, 211.1),
    ('AzureLLMInferenceTrace_code.csv', 8_819, 2047.8, 27.9),
  ],
)
def test_the_published_azure_traces(name, requests, inputs, outputs):
  read = published(name, 'azure')
  assert not read.errors
  found = trace_statistics(read.rows)
  assert found.num_requests == requests
  assert found.input_tokens.mean == pytest.approx(inputs, abs=0.05)
  assert found.output_tokens.mean == pytest.approx(outputs, abs=0.05)
  assert 3400 < found.duration_s < 3600


# Client mixes.


def test_few_clients_send_most_and_the_rate_is_as_asked():
  mix = ClientMix(rate_skew=1.2, cv=1.0, prefix_blocks=1, spread=0.0)
  rows = client_mix(20_000, 5.0, mix, seed=1)
  assert len(rows) / rows[-1].timestamp_s == pytest.approx(5.0, rel=0.05)
  clients = np.bincount([row.hash_ids[0] for row in rows], minlength=100)
  shares = np.sort(clients)[::-1] / len(rows)
  assert shares[:10].sum() == pytest.approx(0.66, abs=0.03)
  assert rows == client_mix(20_000, 5.0, mix, seed=1)
  assert rows != client_mix(20_000, 5.0, mix, seed=2)


@pytest.mark.parametrize('cv', [0.5, 1.0, 3.0])
def test_a_client_comes_in_bursts_of_its_cv(cv):
  rows = client_mix(20_000, 2.0, ClientMix(num_clients=1, cv=cv))
  gaps_s = np.diff([row.timestamp_s for row in rows])
  assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.05)


def test_many_clients_swing_together():
  mix = ClientMix(cv=1.0, swing=0.8, period_s=1000.0)
  times_s = np.array([r.timestamp_s for r in client_mix(40_000, 10.0, mix)])
  phase = times_s % 1000.0
  up, down = np.mean(phase < 500), np.mean(phase >= 500)
  # The integral of 1 + 0.8 * sin over half a turn.
  assert up / down == pytest.approx((1 + 1.6 / np.pi) / (1 - 1.6 / np.pi), 0.1)


def test_lengths_lie_around_the_medians_and_within_the_limits():
  mix = ClientMix(input_tokens=2000, output_tokens=100, max_input_tokens=9000)
  rows = client_mix(20_000, 1.0, replace(mix, rate_skew=0.0))
  inputs = [row.input_tokens for row in rows]
  assert max(inputs) == 9000
  assert np.median(inputs) == pytest.approx(2000, rel=0.3)
  for row in rows:
    assert len(row.hash_ids) == -(-row.input_tokens // 512)


@pytest.mark.parametrize(
  'wrong',
  [
    {'cv': 0.0},
    {'swing': 1.0},
    {'num_clients': 0},
    {'prefix_blocks': 196},
    {'prefix_blocks': 0.5},
  ],
)
def test_a_senseless_mix_is_named(wrong):
  (name,) = wrong
  with pytest.raises(ValueError, match=f'ClientMix.{name}='):
    ClientMix(**wrong)


@pytest.mark.parametrize(
  'name', ['azure_code', 'burstgpt', 'bailian', 'clients']
)
def test_configs_bind_what_there_is(name, tmp_path, monkeypatch):
  samples = {
    'AzureLLMInferenceTrace_code.csv': AZURE,
    'BurstGPT_1.csv': BURSTGPT,
    'qwen_traceA_blksz_16.jsonl': bailian(),
  }
  for file, text in samples.items():
    (tmp_path / file).write_text(text)
  monkeypatch.setenv(TRACES, str(tmp_path))
  run = (ROOT / 'configs/run/sim_conversation.gin').read_text()
  path = tmp_path / 'run.gin'
  path.write_text(run.replace('/conversation.gin', f'/{name}.gin'))
  experiment, _ = load(path, (), Experiment)
  assert len(prepare(experiment, experiment.model.read_config()).requests) >= 1

# SPDX-License-Identifier: Apache-2.0
"""Another's load generator against our server: do both measure the same?

AIPerf replays a Mooncake trace, in an environment of its own (`make peers
PEERS=aiperf`), against the simulated server of configs/serve/sim_paper.gin in
a third process. Its latencies are held against the server's own records,
request by request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
import json
import os
from pathlib import Path
import re
import subprocess
import tempfile
from typing import Any

import numpy as np

from mooncake_jax.gateway.board import MOST_ENDED
from mooncake_jax.workload.generate import conversation
from mooncake_jax.workload.trace import TraceRow
from mooncake_jax.workload.trace import write_trace
from scripts.benches.rows import Row
from scripts.benches.turns import interpreter
from scripts.fuzzing.ledger import fetch
from scripts.fuzzing.server import running
from scripts.gin_source import ROOT

CONFIG = 'configs/serve/sim_paper.gin'
TOKENIZER = ROOT / 'models/smollm2-135m'
# Words are counted as AIPerf counts them.
BINDINGS = (
  'experiment.Experiment.tokenizer=@words/models.Model()',
  f'words/models.Model.path={str(TOKENIZER)!r}',
)
MOST_APART = 0.05
TIMEOUT_S = 600
CALL = re.compile(r'chatcmpl-[0-9a-f]{32}')


@dataclass(frozen=True)
class Latency:
  """Of one request; `itl_s` is None of an answer of one token."""

  ttft_s: float
  itl_s: float | None


def clients(quick: bool) -> list[Row]:
  """How far AIPerf's latencies are from the records of the same requests."""
  if interpreter('aiperf') is None or not TOKENIZER.exists():
    return [Row('clients.aiperf_ttft_apart', None, '', 'AIPerf or model lacks')]
  rows = conversation(20 if quick else 100, requests_per_s=2.0)
  assert len(rows) <= MOST_ENDED
  with (
    tempfile.TemporaryDirectory() as folder,
    running(CONFIG, BINDINGS) as server,
  ):
    theirs = _replay(Path(folder), rows, server.url)
    told = fetch(f'{server.url}/status.json')['requests']
  ours = {_call(life['id']): life for life in told}
  return _compared(len(rows), theirs, ours)


def _compared(
  num_requests: int,
  theirs: dict[str, Latency],
  ours: dict[str, dict[str, Any]],
) -> list[Row]:
  done = [call for call in theirs if ours[call]['outcome'] == 'completed']
  two = [call for call in done if theirs[call].itl_s is not None]
  pairs = {
    'ttft': [(theirs[c].ttft_s, ours[c]['ttft_s']) for c in done],
    'itl': [(theirs[c].itl_s, ours[c]['tpot_s']) for c in two],
  }
  found = [
    Row(
      'clients.aiperf_completed',
      len(done) / num_requests,
      '',
      f'of {num_requests} requests of a Mooncake trace',
      1.0,
    )
  ]
  for name, values in pairs.items():
    client_s, server_s = np.array(values).T
    said = (
      f'mean {client_s.mean() * 1e3:.1f} ms, '
      f'our records {server_s.mean() * 1e3:.1f} ms'
    )
    apart = abs(client_s.mean() / server_s.mean() - 1)
    found.append(
      Row(f'clients.aiperf_{name}_apart', apart, '', said, MOST_APART, True)
    )
    each = np.abs(client_s / server_s - 1)
    found.append(
      Row(
        f'clients.aiperf_{name}_apart_p90',
        float(np.percentile(each, 90)),
        '',
        'of single requests',
      )
    )
  return found


def _replay(
  folder: Path, rows: Sequence[TraceRow], url: str
) -> dict[str, Latency]:
  """AIPerf's latencies by our name of the request."""
  python = interpreter('aiperf')
  assert python is not None
  trace = folder / 'trace.jsonl'
  write_trace(trace, rows)
  out = folder / 'out'
  command = [
    *(str(python.with_name('aiperf')), 'profile', '--model', 'sim'),
    *('--url', url, '--endpoint-type', 'chat', '--streaming'),
    *('--custom-dataset-type', 'mooncake-trace', '--input-file', str(trace)),
    *('--extra-inputs', 'ignore_eos:true', '--tokenizer', 'local/smollm2'),
    *('--export-level', 'raw', '--output-artifact-dir', str(out)),
    # It needs its processors for its clock, not to count tokens once more.
    *('--use-server-token-count', '--no-gpu-telemetry', '--ui', 'none'),
  ]
  done = subprocess.run(
    command,
    env={**os.environ, **as_cached(folder / 'hub')},
    cwd=folder,
    timeout=TIMEOUT_S,
    capture_output=True,
    text=True,
  )
  if done.returncode:
    raise RuntimeError(f'aiperf: {done.stdout[-2000:]}{done.stderr[-2000:]}')
  return _latencies(out)


def as_cached(hub: Path) -> dict[str, str]:
  """The tokenizer as Hugging Face's cache has it, and where that is.

  AIPerf's helpers go offline, where it knows folders no more.
  """
  model = hub / 'models--local--smollm2'
  (model / 'refs').mkdir(parents=True)
  (model / 'refs/main').write_text('main')
  (model / 'snapshots').mkdir()
  (model / 'snapshots/main').symlink_to(TOKENIZER)
  return {'HF_HUB_CACHE': str(hub), 'HF_HUB_OFFLINE': '1'}


def _latencies(out: Path) -> dict[str, Latency]:
  """AIPerf names requests its own way; the answers it kept bear our names."""
  names = {}
  for text in (out / 'profile_export_raw.jsonl').read_text().splitlines():
    asked = json.loads(text)['metadata']['x_request_id']
    if (found := CALL.search(text)) is not None:
      names[asked] = found.group()
  latencies = {}
  for text in (out / 'profile_export.jsonl').read_text().splitlines():
    told = json.loads(text)
    metrics, asked = told['metrics'], told['metadata']['x_request_id']
    itl = metrics.get('inter_token_latency')
    latencies[names[asked]] = Latency(
      metrics['time_to_first_token']['value'] / 1e3,
      itl and itl['value'] / 1e3,
    )
  return latencies


def _call(request_id: str) -> str:
  """The client's request that an answer is of."""
  return request_id.rpartition('-')[0]

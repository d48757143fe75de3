# SPDX-License-Identifier: Apache-2.0
"""FAST'25 figure 14: one request's latency by prompt length, cached or not.

The calibration's own figure. Each prompt is served twice, the second one to a
cluster that has 95 % of it.
"""

from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord
from scripts.config import load
from scripts.experiment import Experiment
from scripts.reproduction.page import deviation
from scripts.reproduction.page import Section
from scripts.reproduction.page import table
from scripts.reproduction.runs import FOLDER
from scripts.reproduction.runs import Runs
from scripts.serving import backends
from scripts.serving import serve_once
from scripts.workloads import Prepared

KILO_TOKENS = (8, 16, 32, 64, 128)
OUTPUT_TOKENS = 128
# Read off the figure, by prompt length.
PAPER = {
  'prefill, 0 % cached': (1.00, 2.05, 4.48, 10.58, 27.52),
  'decode, 0 % cached': (3.39, 3.43, 3.52, 3.66, 3.94),
  'total, 0 % cached': (4.50, 5.65, 8.29, 14.74, 32.41),
  'prefill, 95 % cached': (0.13, 0.23, 0.41, 0.88, 2.33),
  'total, 95 % cached': (3.65, 3.86, 4.25, 5.03, 7.25),
}
APART_S = 1000.0


def breakdown(runs: Runs) -> Section:
  ours = runs.keep('breakdown', _serve)
  columns = ('seconds', *(f'{k}k' for k in KILO_TOKENS), 'mean deviation')
  rows = []
  for what, paper in PAPER.items():
    rows.append((f'{what}, paper', *paper, ''))
    error = sum(abs(a / b - 1) for a, b in zip(ours[what], paper)) / len(paper)
    rows.append((what, *ours[what], f'{100 * error:.1f} %'))
  saved = 1 - ours['prefill, 95 % cached'][-1] / ours['prefill, 0 % cached'][-1]
  first = [ours[f'ttft, {c} % cached'][-1] for c in (0, 95)]
  return Section(
    "Latency breakdown (FAST'25 figure 14): the calibration",
    [
      'One request at a time on an idle cluster, 128 output tokens. Prefill '
      'and decode are what `configs/hardware/a800_x8_llama70b.gin` was fitted '
      'to, with the batch 1 to 16 curve of arXiv figure 2: seven numbers for '
      '31 points, and nothing else of the papers. Totals are not fitted: the '
      'paper has 0.05 to 0.9 s beside prefill and decode.',
      table(columns, rows),
      f'At 128k the cached prefix saves {saved:.0%} of prefill (paper: 92 %) '
      f'and {deviation(first[1], first[0])} of TTFT (paper: -86 %).',
    ],
  )


def _serve() -> dict[str, list[float]]:
  experiment, _ = load(f'{FOLDER}/mooncake.gin', (), Experiment)
  config = experiment.model.read_config()
  requests = _requests(experiment.cluster.block_size_tokens)
  with backends(experiment, config) as make_backend:
    records = serve_once(
      experiment, config, Prepared(requests, len(requests)), make_backend()
    ).records
  found = {}
  for cached, some in ((0, records[0::2]), (95, records[1::2])):
    label = f'{cached} % cached'
    found[f'prefill, {label}'] = [r.prefill_s for r in some]
    found[f'ttft, {label}'] = [r.ttft_s for r in some]
    found[f'decode, {label}'] = [_decode_s(r) for r in some]
    found[f'total, {label}'] = [_of(r.finished_s) - r.arrival_s for r in some]
  return found


def _requests(block_tokens: int) -> list[Request]:
  """For each length a prompt, and one that has 95 % of its blocks."""
  made = []
  for i, kilo in enumerate(KILO_TOKENS):
    # 128k and its output are more than the model takes: a little less.
    tokens = min(kilo << 10, (128 << 10) - OUTPUT_TOKENS)
    for again in (0, 1):
      blocks = tokens // block_tokens
      same = round(0.95 * blocks) if again else 0
      keys = [_key(i, 0 if n < same else again, n) for n in range(blocks)]
      at_s = (2 * i + again) * APART_S
      name = f'{kilo}k{again}'
      made.append(Request(name, at_s, tokens, OUTPUT_TOKENS, tuple(keys)))
  return made


def _key(prompt: int, again: int, block: int) -> bytes:
  return f'{prompt} {again} {block}'.encode()


def _decode_s(record: RequestRecord) -> float:
  return _of(record.finished_s) - _of(record.first_token_s)


def _of(seconds: float | None) -> float:
  assert seconds is not None
  return seconds

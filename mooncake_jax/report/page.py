# SPDX-License-Identifier: Apache-2.0
"""A run as one HTML page that needs no other file."""

from collections.abc import Mapping
from collections.abc import Sequence
from html import escape
import json
from typing import Any

from mooncake_jax.events import WorkDone
from mooncake_jax.metrics.latency import tbt_tail_s
from mooncake_jax.metrics.summary import Summary
from mooncake_jax.metrics.table import table
from mooncake_jax.report import plots
from mooncake_jax.report.gantt import gantt
from mooncake_jax.report.prompt_chart import longest_prompt
from mooncake_jax.report.prompt_chart import prompt_bars
from mooncake_jax.request import RequestRecord
from mooncake_jax.slo import SLO

MOST_BARS = 600  # more are a blur, and slow to draw

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 62em;
       color: #222; padding: 0 1em }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto }
figure { display: inline-block; margin: .5em .5em .5em 0 }
"""


def page(
  title: str,
  records: Sequence[RequestRecord],
  summary: Summary,
  slo: SLO,
  config: str,
  environment: Mapping[str, Any],
  works: Sequence[WorkDone] = (),
) -> str:
  """Summary, plots, the operative config and the environment."""
  drawn = [*_plots(records, slo), *_prompt(works)]
  figures = ''.join(f'<figure>{p}</figure>' for p in drawn)
  return (
    '<!doctype html><html lang="en"><meta charset="utf-8">'
    f'<title>{escape(title)}</title><style>{_STYLE}</style>'
    f'<h1>{escape(title)}</h1><pre>{escape(table(summary))}</pre>{figures}'
    f'{_fold("Operative config", config)}'
    f'{_fold("Environment", json.dumps(environment, indent=2))}</html>\n'
  )


def _fold(label: str, text: str) -> str:
  return (
    f'<details><summary>{escape(label)}</summary>'
    f'<pre>{escape(text)}</pre></details>'
  )


def _plots(records: Sequence[RequestRecord], slo: SLO) -> list[str]:
  ttft_s = [r.ttft_s for r in records if r.ttft_s is not None]
  tails_s = [t for t in map(tbt_tail_s, records) if t is not None]
  return [
    plots.distribution(ttft_s, slo.ttft_s, 'Time to first token'),
    plots.distribution(tails_s, slo.tbt_s, 'Time between tokens, tail mean'),
    plots.shares(_hits(records), 'Prompt tokens by where they came from'),
  ]


def _prompt(works: Sequence[WorkDone]) -> list[str]:
  """The longest prompt's chunks and transfers, if it was cut at all."""
  longest = longest_prompt(works)
  bars = prompt_bars(longest)
  if len({bar.text for bar in bars}) < 3 or len(bars) > MOST_BARS:
    return []
  title = f'Chunks and transfers of {longest[0].request_id}'
  return [plots.svg(gantt({title: bars}))]


def _hits(records: Sequence[RequestRecord]) -> dict[str, float]:
  """Share of the served requests' prompt tokens by tier, and computed."""
  served = [r for r in records if r.first_token_s is not None]
  total = sum(r.prompt_tokens for r in served) or 1
  tiers = sorted({tier for r in served for tier in r.reused_tokens})
  by_tier = {
    tier: sum(r.reused_tokens.get(tier, 0) for r in served) / total
    for tier in tiers
  }
  return by_tier | {'computed': 1 - sum(by_tier.values())}

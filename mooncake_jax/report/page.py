# SPDX-License-Identifier: Apache-2.0
"""A run, or several, as one HTML page that needs no other file."""

from collections.abc import Mapping
from collections.abc import Sequence
from html import escape
import json
from typing import Any

from mooncake_jax.events import WorkDone
from mooncake_jax.metrics.latency import tbt_tail_s
from mooncake_jax.metrics.summary import Summary
from mooncake_jax.metrics.table import comparison
from mooncake_jax.metrics.table import table
from mooncake_jax.report import plots
from mooncake_jax.report.gantt import gantt
from mooncake_jax.report.prompt_chart import longest_prompt
from mooncake_jax.report.prompt_chart import prompt_bars
from mooncake_jax.request import RequestRecord
from mooncake_jax.slo import SLO

TTFT, TBT = 'Time to first token', 'Time between tokens, tail mean'
MOST_BARS = 600  # more are a blur, and slow to draw

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 62em;
       color: #222; padding: 0 1em }
pre, .wide { overflow-x: auto }
pre { background: #f6f6f6; padding: 1em }
figure { display: inline-block; margin: .5em .5em .5em 0; max-width: 100% }
svg { max-width: 100%; height: auto }
table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd }
td { white-space: nowrap }
th:first-child, td:first-child { text-align: left }
h1 { overflow-wrap: anywhere }
.answer { font-size: 1.3em; border-left: 4px solid #2a5caa; padding-left: .8em }
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
  folded = {
    'Operative config': config,
    'Environment': json.dumps(environment, indent=2),
  }
  return _document(title, table(summary), drawn, folded)


def comparison_page(
  title: str, runs: Mapping[str, tuple[Sequence[RequestRecord], Summary]]
) -> str:
  """Several runs: figures in columns, latencies in the same plots.

  The limits drawn are the first run's.
  """
  summaries = {name: summary for name, (_, summary) in runs.items()}
  first = next(iter(summaries.values()))
  ttfts = {name: _ttft_s(records) for name, (records, _) in runs.items()}
  tails = {name: _tails_s(records) for name, (records, _) in runs.items()}
  drawn = [
    plots.distributions(ttfts, first.slo_ttft_s, TTFT),
    plots.distributions(tails, first.slo_tbt_s, TBT),
  ]
  return _document(title, comparison(summaries), drawn, {})


def _document(
  title: str, text: str, drawn: Sequence[str], folded: Mapping[str, str]
) -> str:
  figures = ''.join(f'<figure>{p}</figure>' for p in drawn)
  return document(title, f'<pre>{escape(text)}</pre>{figures}', folded)


def document(title: str, body: str, folded: Mapping[str, str]) -> str:
  """A whole page.

  Args:
    body: HTML.
    folded: texts that are shown when asked for, by their label.
  """
  folds = ''.join(_fold(*item) for item in folded.items())
  return (
    '<!doctype html><html lang="en"><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width">'
    f'<title>{escape(title)}</title><style>{_STYLE}</style>'
    f'<h1>{escape(title)}</h1>{body}{folds}</html>\n'
  )


def _fold(label: str, text: str) -> str:
  return (
    f'<details><summary>{escape(label)}</summary>'
    f'<pre>{escape(text)}</pre></details>'
  )


def _plots(records: Sequence[RequestRecord], slo: SLO) -> list[str]:
  return [
    plots.distribution(_ttft_s(records), slo.ttft_s, TTFT),
    plots.distribution(_tails_s(records), slo.tbt_s, TBT),
    plots.shares(_hits(records), 'Prompt tokens by where they came from'),
  ]


def _ttft_s(records: Sequence[RequestRecord]) -> list[float]:
  return [r.ttft_s for r in records if r.ttft_s is not None]


def _tails_s(records: Sequence[RequestRecord]) -> list[float]:
  return [t for t in map(tbt_tail_s, records) if t is not None]


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

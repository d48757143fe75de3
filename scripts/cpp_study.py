# SPDX-License-Identifier: Apache-2.0
"""What notebooks/cpp_chunk_size.ipynb computes and draws.

Takes the rows of a sweep over chunk size, stages, prompt length and chunking
(configs/sweep/cpp_paper.gin, cpp_small.gin) and a cost model; gives tables and
figures.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import fields
from dataclasses import replace
from typing import Any
from typing import get_args

from mooncake_jax.cluster_spec import Executor
from mooncake_jax.costs.best_chunk import ideal_chunk_tokens
from mooncake_jax.costs.chunks import chunk_seconds
from mooncake_jax.costs.chunks import chunk_stops
from mooncake_jax.costs.chunks import Chunking
from mooncake_jax.costs.fit import fit_prefill
from mooncake_jax.costs.fit import PrefillSample
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import LINKS
from mooncake_jax.costs.model import PolynomialCost
from mooncake_jax.costs.pipeline import best_chunk_tokens
from mooncake_jax.costs.pipeline import even_bubble_share
from mooncake_jax.costs.pipeline import even_makespan_s
from mooncake_jax.costs.pipeline import split
from mooncake_jax.costs.pipeline import stage_spans
from mooncake_jax.costs.pipeline import StageSpan
from mooncake_jax.report.gantt import Bar
from mooncake_jax.report.gantt import gantt
from mooncake_jax.report.lines import line_panels
from mooncake_jax.report.listing import Listing
from scripts.sweeps.table import short_names
from scripts.sweeps.table import SweepRow

TTFT = 'ttft_s.mean'
PARTS = ('compute_s', 'bubble_s', 'boundary_s', 'kv_exposed_s')
SIZES = tuple(256 * 2**i for i in range(9))


def values(row: SweepRow) -> dict[str, Any]:
  """A point's values by the short names of its axes."""
  names = short_names([*row.point.values])
  return {names[axis]: value for axis, value in row.point.values.items()}


def where(rows: Iterable[SweepRow], **wanted: Any) -> list[SweepRow]:
  """Rows whose axes have these values: stages=4, chunking='fixed'."""
  return [row for row in rows if wanted.items() <= values(row).items()]


def best(rows: Sequence[SweepRow]) -> SweepRow:
  """The one with the least TTFT."""
  return min(rows, key=lambda row: row.figures[TTFT] or float('inf'))


def fitted(costs: CostModel, max_tokens: int) -> PolynomialCost:
  """The polynomial nearest to a cost model, for its closed forms."""
  samples = [
    PrefillSample(chunk, prefix, costs.prefill_s(chunk, prefix))
    for chunk in (1024, 2048, 4096, 8192)
    for prefix in (0, max_tokens // 4, max_tokens // 2, max_tokens)
  ]
  links = {f'{link}_bytes_per_s': 1.0 for link in LINKS}
  given = {field.name for field in fields(PolynomialCost)}
  others = {name: 0.0 for name in given if name.startswith('decode_')}
  others |= {f'{link}_latency_s': 0.0 for link in LINKS}
  return PolynomialCost(**links, **others, **fit_prefill(samples).coefficients)


def plan(
  costs: CostModel,
  num_tokens: int,
  stages: int,
  chunk_tokens: int,
  chunking: Chunking = 'fixed',
  quantum: int = 64,
) -> list[StageSpan]:
  """When each chunk of a prompt is on each of so many even stages."""
  stops = chunk_stops(costs, num_tokens, 0, chunk_tokens, chunking, quantum)
  return stage_spans(chunk_seconds(costs, 0, stops), [1] * stages)


def bubbles(stages: Sequence[int], most_chunks: int = 64) -> Any:
  """Idle share of the stages over the number of chunks, equal ones."""
  counts = [2**i for i in range(most_chunks.bit_length())]
  lines = {}
  for s in stages:
    lines[f'{s} stages, (s - 1) / (n + s - 1)'] = [
      (n, even_bubble_share(n, s)) for n in counts
    ]
    lines[f'{s} stages, by the recurrence'] = [
      (n, bubble_share(stage_spans([1.0] * n, [1] * s))) for n in counts
    ]
  return line_panels({'equal chunks': lines}, 'chunks', 'idle share', 1)


def bubble_share(spans: Sequence[StageSpan]) -> float:
  """Idle share of the stages' time."""
  parts = split(spans)
  return parts.bubble_s / parts.makespan_s


def curves(rows: Sequence[SweepRow], figure: str = TTFT) -> Any:
  """A figure over chunk size: a line for each number of stages, a panel a
  prompt length.
  """
  lengths = sorted({values(row)['num_tokens'] for row in rows})
  stages = sorted({values(row)['stages'] for row in rows})
  found = {}
  for tokens in lengths:
    found[f'{tokens} tokens'] = {
      f'{s} stages': points
      for s in stages
      if (points := _points(where(rows, num_tokens=tokens, stages=s), figure))
    }
  return line_panels(found, 'chunk tokens', figure)


def _points(rows: Sequence[SweepRow], figure: str) -> list[tuple[int, float]]:
  return [
    (values(row)['chunk_tokens'], found)
    for row in rows
    if (found := row.figures.get(figure)) is not None
  ]


def exposed(rows: Sequence[SweepRow]) -> Any:
  """KVCache still on its way when prefill ends: a line a way of streaming."""
  name = 'prefill.kv_exposed_s'
  ways = dict.fromkeys(values(row)['streaming'] for row in rows)
  lines = {way: _points(where(rows, streaming=way), name) for way in ways}
  return line_panels({'': lines}, 'chunk tokens', 'seconds exposed', 1)


def naps(chunks: int, stages: int, stage_s: float) -> Any:
  """The engine's executors with stages that do nothing but take time."""
  from scripts.benches import fixed_stages

  ideal_s = even_makespan_s(chunks, stages, stages * stage_s)
  panels = {}
  for executor in get_args(Executor):
    spans = fixed_stages.measure(executor, chunks, stages, stage_s)
    ratio = fixed_stages.makespan_s(spans) / ideal_s
    title = f'{executor}: {ratio:.2f} of the ideal {ideal_s * 1e3:.0f} ms'
    panels[title] = measured_spans(spans)
  return charts(panels)


def engine_table(rows: Sequence[SweepRow]) -> Listing:
  """Measured means by prompt, stages and chunk size."""
  names = (
    TTFT,
    'prefill.compute_s',
    'prefill.bubble_s',
    'prefill.boundary_s',
    'prefill.kv_exposed_s',
  )
  axes = ('num_tokens', 'stages', 'chunk_tokens')
  lines = [
    [*(values(row)[axis] for axis in axes), *map(row.figures.get, names)]
    for row in rows
  ]
  return Listing((*axes, *names), sorted(lines, key=lambda line: line[:3]))


def best_sizes(rows: Sequence[SweepRow], costs: CostModel) -> Listing:
  """By prompt and stages: the best chunks, and what they gain."""
  axes = [values(row) for row in rows]
  lengths = sorted({v['num_tokens'] for v in axes})
  counts = sorted({v['stages'] for v in axes})
  polynomial = fitted(costs, max(lengths))
  lines = []
  for tokens in lengths:
    alone = best(where(rows, num_tokens=tokens, stages=1)).figures[TTFT]
    for stages in counts:
      lines.append(
        [tokens, stages, *_best_line(rows, polynomial, tokens, stages, alone)]
      )
  return Listing(
    (
      'prompt tokens',
      'stages',
      'best fixed chunk',
      'closed form',
      'TTFT s',
      'speed-up',
      'best dynamic chunk',
      'TTFT s, dynamic',
      'gain',
    ),
    lines,
  )


def _best_line(
  rows: Sequence[SweepRow],
  costs: PolynomialCost,
  tokens: int,
  stages: int,
  alone_s: float | None,
) -> list[Any]:
  here = where(rows, num_tokens=tokens, stages=stages)
  fixed = best(where(here, chunking='fixed'))
  dynamic = best(where(here, chunking='dynamic'))
  fixed_s, dynamic_s = fixed.figures[TTFT], dynamic.figures[TTFT]
  assert fixed_s and dynamic_s and alone_s
  return [
    values(fixed)['chunk_tokens'],
    round(ideal_chunk_tokens(costs, tokens, stages)),
    fixed_s,
    alone_s / fixed_s,
    values(dynamic)['chunk_tokens'],
    dynamic_s,
    1 - dynamic_s / fixed_s,
  ]


def dynamic_gain(
  rows: Sequence[SweepRow], num_tokens: int, stages: int
) -> Listing:
  """Fixed against dynamic chunks of one largest size, for each size."""
  here = where(rows, num_tokens=num_tokens, stages=stages)
  lines = []
  for row in where(here, chunking='fixed'):
    size = values(row)['chunk_tokens']
    (other,) = where(here, chunking='dynamic', chunk_tokens=size)
    fixed_s, dynamic_s = row.figures[TTFT], other.figures[TTFT]
    assert fixed_s and dynamic_s
    lines.append([size, fixed_s, dynamic_s, 1 - dynamic_s / fixed_s])
  columns = ('chunk tokens', 'TTFT s, fixed', 'TTFT s, dynamic', 'gain')
  return Listing(columns, lines)


def parts(rows: Sequence[SweepRow], label: str = 'chunk_tokens') -> Any:
  """Bars of what the TTFT of each row consists of."""
  from matplotlib.figure import Figure  # 0.3 s: paid by who plots

  figure = Figure((7.0, 3.2), layout='constrained')
  axes = figure.subplots()
  names = [str(values(row)[label]) for row in rows]
  bottom = [0.0] * len(rows)
  for part in PARTS:
    heights = [row.figures.get(f'prefill.{part}') or 0.0 for row in rows]
    name = part.removesuffix('_s').replace('_', ' ')
    axes.bar(names, heights, bottom=bottom, label=name)
    bottom = [b + h for b, h in zip(bottom, heights)]
  axes.set_xlabel(label.replace('_', ' '))
  axes.set_ylabel('seconds')
  axes.legend(fontsize=8)
  axes.spines[['top', 'right']].set_visible(False)
  return figure


def bars(spans: Sequence[StageSpan]) -> list[Bar]:
  """A row a stage, a colour a chunk."""
  return [
    Bar(f'stage {s.stage}', s.start_s, s.stop_s, s.chunk, str(s.chunk))
    for s in sorted(spans, key=lambda span: (span.stage, span.start_s))
  ]


def charts(panels: Mapping[str, Sequence[StageSpan]]) -> Any:
  """Which chunk is on which stage when, a panel each, from 0."""
  return gantt({title: bars(from_zero(s)) for title, s in panels.items()})


def from_zero(spans: Sequence[StageSpan]) -> list[StageSpan]:
  """The same, the first at 0."""
  begin_s = min(span.start_s for span in spans)
  return [
    s._replace(start_s=s.start_s - begin_s, stop_s=s.stop_s - begin_s)
    for s in spans
  ]


def measured_spans(
  spans: Sequence[Sequence[tuple[float, float]]],
) -> list[StageSpan]:
  """[chunk][stage] -> (start_s, stop_s), as backends report them."""
  return [
    StageSpan(chunk, stage, *span)
    for chunk, stages in enumerate(spans)
    for stage, span in enumerate(stages)
  ]


def overheads(
  costs: CostModel,
  num_tokens: int,
  stages: int,
  base_s: Sequence[float],
  sizes: Sequence[int] = SIZES,
) -> Listing:
  """Where the best chunk lies as what every chunk costs besides grows."""
  polynomial = fitted(costs, num_tokens)
  lines = []
  for c in base_s:
    costs_c = replace(polynomial, prefill_base_s=c)
    found = best_chunk_tokens(costs_c, num_tokens, 0, [1] * stages, sizes)
    ideal = round(ideal_chunk_tokens(costs_c, num_tokens, stages))
    lines.append([c * 1e3, found, ideal])
  columns = ('c, ms a chunk', 'best of the sizes', 'closed form')
  return Listing(columns, lines)

# SPDX-License-Identifier: Apache-2.0
"""An assessment as one HTML page that needs no other file, and as text."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import astuple
from html import escape
import json
from typing import Any

from mooncake_jax.assess.assessed import Assessed
from mooncake_jax.assess.break_even import BreakEven
from mooncake_jax.assess.reuse import Reuse
from mooncake_jax.assess.supposed import Supposed
from mooncake_jax.assess.verdict import percent
from mooncake_jax.assess.verdict import System
from mooncake_jax.metrics.table import number
from mooncake_jax.report.lines import line_panels
from mooncake_jax.report.measured import measured_section
from mooncake_jax.report.page import document
from mooncake_jax.report.parts import Cell
from mooncake_jax.report.parts import listed
from mooncake_jax.report.parts import pair
from mooncake_jax.report.parts import paragraph
from mooncake_jax.report.parts import table
from mooncake_jax.report.parts import tokens
from mooncake_jax.report.plots import intervals
from mooncake_jax.report.plots import svg


def assessment_page(
  found: Assessed, config: str, environment: Mapping[str, Any]
) -> str:
  """Verdict first, then what it rests on.

  Args:
    config, environment: as `page.page` shows them.
  """
  parts = [
    *_verdict(found),
    *_systems(found),
    *_supposed(found.supposed),
    *_sweeps(found),
    *_reuse(found.reuse, found.kv_bytes_per_token),
    *_break_even(found.even),
    *_measured(found),
    *_trace(found),
  ]
  folded = {
    'Operative config': config,
    'Environment': json.dumps(environment, indent=2),
  }
  return document(f'{found.trace}: {found.title}', ''.join(parts), folded)


def told(found: Assessed) -> str:
  """The verdict and the systems as plain text."""
  lines = [f'\n{found.trace}: {found.verdict.sentence}\n', *_read(found)]
  lines += [f'  - {each}' for each in found.verdict.reasons]
  lines += ['\nDoubts:', *(f'  - {each}' for each in found.verdict.doubts)]
  lines.append(f'\n{"system":28}goodput  share  hit rate  TTFT P90  TBT P90')
  for each in found.systems:
    lines.append(
      f'{each.name:28}{each.rate:7.3g}{each.share:7.3f}'
      f'{number(each.hit_rate):>10}{number(each.ttft_p90_s):>10}'
      f'{number(each.tbt_p90_s):>9}'
    )
  return '\n'.join(lines)


def _read(found: Assessed) -> Iterator[str]:
  """What was understood of the trace: a wrong unit shows here."""
  of = found.statistics
  yield (
    f'Read as {found.trace_format}: {of.num_requests:,} requests in '
    f'{of.duration_s:,.4g} s; in the mean {of.input_tokens.mean:,.0f} tokens '
    f'asked, {of.output_tokens.mean:,.0f} answered.'
  )
  if found.errors:
    yield f'Left out, or assumed: {found.errors[0]}'
  if (more := len(found.errors) - 1) > 0:
    yield f'  and {more} more, see the page'
  yield ''


def _verdict(found: Assessed) -> Iterator[str]:
  verdict = found.verdict
  yield f'<p class="answer">{escape(verdict.sentence)}</p>'
  yield listed('Why', verdict.reasons)
  yield listed('What may be otherwise', verdict.doubts)


def _systems(found: Assessed) -> Iterator[str]:
  of = found.simulated
  yield f'<h2>Systems, {of.nodes} nodes each</h2>'
  yield paragraph(
    f'Goodput is the highest rate at which {of.target:.0%} of all requests '
    f'have their first token within {of.slo_ttft_s:g} s and a TBT of at most '
    f"{of.slo_tbt_s:g} s; the workload's own arrivals are made faster or "
    f'slower alike. Share, hit rate and times are those at its own rate, '
    f'{of.requests_per_s:.3g} requests/s.'
  )
  yield table(
    (
      'system',
      'goodput, requests/s',
      'least',
      'most',
      'share',
      'hit rate',
      'TTFT P90, s',
      'TBT P90, s',
    ),
    (_system(each) for each in found.systems),
  )
  bars = {each.name: astuple(each.goodput) for each in found.systems}
  drawn = intervals(bars, 'requests/s', 'Goodput; of the best, in all cases')
  yield f'<figure>{drawn}</figure>'
  finalists = [each for each in found.systems if len(each.goodputs) > 1]
  cases = list(dict.fromkeys(c for each in finalists for c in each.goodputs))
  yield '<h3>The same where things are not as predicted</h3>'
  yield table(
    ('goodput, requests/s', *(each.name for each in finalists)),
    (
      (case, *(each.goodputs.get(case) for each in finalists)) for case in cases
    ),
  )


def _system(system: System) -> Sequence[Cell]:
  each = system.goodput
  known = len(system.goodputs) > 1
  return (
    system.name,
    each.value,
    each.low if known else None,
    each.high if known else None,
    system.share,
    system.hit_rate,
    system.ttft_p90_s,
    system.tbt_p90_s,
  )


def _supposed(supposed: Sequence[Supposed]) -> Iterator[str]:
  if not supposed:
    return
  yield '<h2>What if prompts shared more?</h2>'
  yield paragraph(
    'The same arrivals and lengths, but each prompt begins as an earlier one '
    'does, drawn among all before it, by a share of its length in whole '
    'blocks. Goodputs in requests/s, the coupled one with prefix caching.'
  )
  yield table(
    ('shared', 'hit rate', 'Mooncake', 'coupled', 'P/D, no store', 'gain'),
    (
      (
        f'{each.share:.0%}',
        each.hit_rate,
        each.store,
        each.coupled,
        each.apart,
        percent(each.gain),
      )
      for each in supposed
    ),
  )


def _sweeps(found: Assessed) -> Iterator[str]:
  yield '<h2>Sweeps</h2>'
  for what, tried in found.sweeps.items():
    yield f'<h3>{escape(what[0].upper() + what[1:])}</h3>'
    yield table(
      ('', 'system', 'requests/s', 'share', 'hit rate', 'TTFT P90, s'),
      (
        (
          each.value,
          each.system,
          each.requests_per_s,
          each.share,
          each.hit_rate,
          each.ttft_p90_s,
        )
        for each in tried
      ),
    )


def _reuse(reuse: Reuse | None, kv_bytes_per_token: int) -> Iterator[str]:
  yield '<h2>Reuse</h2>'
  if reuse is None:
    yield paragraph(
      'Unknown: the trace has lengths alone. Possible hits, working set, room '
      'and age of what is reused need hashes of the prompts, or the prompts.'
    )
    return
  yield paragraph(
    f'{reuse.hit_rate:.1%} of {reuse.prompt_tokens / 1e6:.1f} M prompt tokens '
    f'could be reused in blocks of {reuse.block_size_tokens}, by '
    f'{reuse.hit_prompts:.0%} of {reuse.num_prompts:,} prompts.'
  )
  yield table(
    ('reusable prefix of at least', 'prompts', 'tokens, of all'),
    ((f'{p.prefix_tokens:,}', p.prompts, p.tokens) for p in reuse.by_prefix),
  )
  yield table(
    ('used again within, s', 'of the reusable tokens'),
    ((str(age), share) for age, share in reuse.by_age_s.items()),
  )
  if len(reuse.by_tenant) > 1:
    yield table(
      ('tenant', 'prompts', 'prompt tokens', 'hit rate'),
      (
        (t.tenant, t.prompts, t.prompt_tokens, t.hit_rate)
        for t in reuse.by_tenant
      ),
    )
  gib = kv_bytes_per_token / 2**30
  yield table(
    ('block size, tokens', 'distinct tokens', 'GiB', 'possible hit rate'),
    (
      (
        str(w.block_size_tokens),
        w.unique_tokens,
        w.unique_tokens * gib,
        w.hit_rate,
      )
      for w in reuse.working_sets
    ),
  )
  yield table(
    ('of the possible hits', 'room, tokens', 'GiB'),
    (
      (f'{share:.0%}', tokens, tokens * gib)
      for share, tokens in reuse.capacity_tokens.items()
    ),
  )
  if reuse.curve:
    points = [(max(tokens, 1) * gib, share) for tokens, share in reuse.curve]
    drawn = line_panels(
      {'Hits by room (LRU, exact)': {'': points}}, 'GiB', 'hit rate'
    )
    yield f'<figure>{svg(drawn)}</figure>'


def _break_even(even: BreakEven) -> Iterator[str]:
  yield '<h2>Recompute or fetch?</h2>'
  measured = even.spread.points
  yield paragraph(
    'Seconds at P50 and P99. '
    + (
      f'P99 from {measured} measured times; links without any have assumed '
      'noise.'
      if measured
      else 'P99 from assumed noise: no measured times were given.'
    )
    + f' An instance computes {even.flops_per_s / 1e12:.0f} TFLOP/s.'
  )
  media = [*even.tokens]
  yield table(
    ('prefix, tokens', 'recompute', *media),
    (
      (
        f'{row.prefix_tokens:,}',
        pair(row.recompute_s),
        *(pair(row.fetch_s[medium]) for medium in media),
      )
      for row in even.rows
    ),
  )
  yield table(
    ('prefix, tokens', 'MB', 'pays from GB/s, by the costs', 'by the formula'),
    (
      (
        f'{row.prefix_tokens:,}',
        row.num_bytes / 1e6,
        row.least_bytes_per_s / 1e9,
        row.formula_bytes_per_s / 1e9,
      )
      for row in even.rows
    ),
  )
  yield table(
    ('fetching beats recomputing, from tokens', *media),
    (
      ('at P50', *(tokens(even.tokens[medium]) for medium in media)),
      ('at P99', *(tokens(even.sure_tokens[medium]) for medium in media)),
      (
        'by the formula',
        *(tokens(even.formula_tokens[medium]) for medium in media),
      ),
    ),
  )
  lines = {
    'recompute': [(r.prefix_tokens, r.recompute_s[0]) for r in even.rows]
  }
  for medium in media[1:]:
    lines[medium] = [(r.prefix_tokens, r.fetch_s[medium][0]) for r in even.rows]
  drawn = line_panels({'P50': lines}, 'prefix, tokens', 'seconds', log_y=True)
  yield f'<figure>{svg(drawn)}</figure>'


def _measured(found: Assessed) -> Iterator[str]:
  if not found.measured:
    return
  yield '<h2>The same measured, end to end</h2>'
  yield paragraph(
    'Not of the nodes and the model above, but of what the engine, the store '
    'and the transfer engine do on a machine at hand: so far may the formula '
    'be off. Own machines: scripts/break_even.py.'
  )
  for each in found.measured:
    yield from measured_section(each)


def _trace(found: Assessed) -> Iterator[str]:
  of, part = found.statistics, found.simulated
  yield '<h2>Trace</h2>'
  yield paragraph(
    f'{found.trace}, format {found.trace_format}: {of.num_requests:,} requests '
    f'in {of.duration_s:,.0f} s. Simulated: {part.num_requests:,} from number '
    f'{part.first:,} on, {part.duration_s:,.0f} s. All took '
    f'{found.seconds:.0f} s.'
  )
  names = ('mean', 'P50', 'P90', 'P99', 'least', 'most')
  yield table(
    ('tokens', *names),
    (
      (name, *(f'{value:,.0f}' for value in astuple(lengths)))
      for name, lengths in (
        ('prompt', of.input_tokens),
        ('answer', of.output_tokens),
      )
    ),
  )
  if found.errors:
    yield listed('Left out, or assumed', found.errors)

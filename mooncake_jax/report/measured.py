# SPDX-License-Identifier: Apache-2.0
"""A measured break-even: a section of the assessment's page, and text."""

from collections.abc import Iterator
from html import escape
import json
from pathlib import Path

from mooncake_jax.assess.measured import Measured
from mooncake_jax.assess.measured import measured_even
from mooncake_jax.assess.measured import MeasuredEven
from mooncake_jax.metrics.finite import finite
from mooncake_jax.report.codec import decode
from mooncake_jax.report.codec import encode
from mooncake_jax.report.lines import line_panels
from mooncake_jax.report.parts import listed
from mooncake_jax.report.parts import pair
from mooncake_jax.report.parts import paragraph
from mooncake_jax.report.parts import table
from mooncake_jax.report.parts import tokens
from mooncake_jax.report.plots import svg

LENGTHS = ('prefix, tokens', 'MB', 'needs GB/s, measured', 'by formula', 'off')
MEDIA = ('prefix in', 'GB/s', 'pays from, P50', 'P99', 'by formula')


def write_measured(path: Path, measured: Measured) -> None:
  """The trials, and what follows from them."""
  found = {
    'measured': encode(measured),
    'found': encode(measured_even(measured)),
  }
  path.write_text(json.dumps(finite(found), allow_nan=False) + '\n')


def read_measured(path: Path) -> Measured:
  """The trials that `write_measured` wrote.

  Raises:
    ValueError: it did not write that.
    OSError: there is no such file.
  """
  try:
    return decode(json.loads(path.read_text())['measured'], Measured)
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f'{path}: not of scripts/break_even.py: {error}') from None


def measured_section(measured: Measured) -> Iterator[str]:
  """HTML of one machine and model."""
  even = measured_even(measured)
  yield f'<h3>{escape(measured.title)}</h3>'
  yield paragraph(_how(measured, even))
  names = [*even.lengths[0].ttft_s]
  yield table(
    ('prefix, tokens', *names),
    (
      (f'{e.prefix_tokens:,}', *(pair(e.ttft_s[name]) for name in names))
      for e in even.lengths
    ),
  )
  lines = {
    name: [(e.prefix_tokens, e.ttft_s[name][0]) for e in even.lengths]
    for name in names
  }
  title = {'Time to first token, P50': lines}
  drawn = line_panels(title, 'prefix, tokens', 'seconds', log_y=True)
  yield f'<figure>{svg(drawn)}</figure>'
  yield table(MEDIA, _media(even))
  yield table(LENGTHS, _lengths(even))
  yield listed('What that says', says(even))


def told(measured: Measured, even: MeasuredEven) -> str:
  """The same as plain text."""
  names = [*even.lengths[0].ttft_s]
  rows = [
    (f'{e.prefix_tokens:,}', *(pair(e.ttft_s[name]) for name in names))
    for e in even.lengths
  ]
  tables = [
    [('TTFT, s, P50 / P99', *names), *rows],
    [MEDIA, *_media(even)],
    [LENGTHS, *_lengths(even)],
  ]
  parts = [f'{measured.title}: {_how(measured, even)}']
  parts += ['\n'.join(_aligned(each)) for each in tables]
  parts.append('\n'.join(f'  - {line}' for line in says(even)))
  return '\n\n'.join(parts)


def says(even: MeasuredEven) -> list[str]:
  """The closed form beside what was measured, in words."""
  least, most = even.off
  found = [
    f'The closed form asks for {least:.2g} to {most:.2g} times the bandwidth '
    'that is needed here. It lets each token of the prefix attend to all of '
    'it, twice what causal attention takes; it knows no fixed cost of a chunk '
    'or a fetch; and its G, that of the longest prompt, is one for all.'
  ]
  for each in even.media:
    if each.bytes_per_s is None:
      continue
    found.append(
      f'{each.name}, {each.bytes_per_s / 1e9:.2g} GB/s: a fetch beats '
      f'recomputing from {tokens(each.tokens)} tokens on at P50 and from '
      f'{tokens(each.sure_tokens)} at P99; by the formula from '
      f'{tokens(each.formula_tokens)}.'
    )
  return found


def _how(measured: Measured, even: MeasuredEven) -> str:
  about = measured.environment
  device = about['devices'][0].split('_')[0]
  is_cpu = 'cpu' in device.lower()
  where = {
    'ray': 'a process an instance',
    'device': 'all instances in one process',
  }[measured.backend]
  load, count = about.get('load', '-'), len(about['devices'])
  return (
    f'Measured {about["started"]} on {about["system"]} {about["machine"]}, '
    f'{about["cpus"]} CPUs at load {load}, {count} devices ({device}), '
    f'{where}, in {measured.seconds:.0f} s; commit '
    f'{str(about["commit"])[:9]}. Prompts of '
    f'the prefix and {measured.rest_tokens} tokens more, one at a time, served '
    f'{even.repeats} times and more each: seconds to the first token at P50 / '
    f'P99 (of so few, P99 is nearly the largest). The longest computes at '
    f'{even.flops_per_s / 1e9:.3g} GFLOP/s.'
    + (' HBM and DRAM of CPU devices are one memory.' if is_cpu else '')
  )


def _media(even: MeasuredEven) -> list[tuple[str, ...]]:
  return [
    (
      each.name,
      '-' if each.bytes_per_s is None else f'{each.bytes_per_s / 1e9:.3g}',
      tokens(each.tokens),
      tokens(each.sure_tokens),
      tokens(each.formula_tokens),
    )
    for each in even.media
  ]


def _lengths(even: MeasuredEven) -> list[tuple[str, ...]]:
  found = []
  for each in even.lengths:
    asked, needed = each.formula_bytes_per_s, each.least_bytes_per_s
    found.append(
      (
        f'{each.prefix_tokens:,}',
        f'{each.num_bytes / 1e6:.3g}',
        '-' if needed is None else f'{needed / 1e9:.3g}',
        f'{asked / 1e9:.3g}',
        '-' if needed is None else f'{asked / needed:.2f} x',
      )
    )
  return found


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
  widths = [max(map(len, column)) for column in zip(*rows)]
  for first, *rest in rows:
    cells = map(str.rjust, rest, widths[1:])
    yield '  '.join([first.ljust(widths[0]), *cells])

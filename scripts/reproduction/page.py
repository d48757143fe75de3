# SPDX-License-Identifier: Apache-2.0
"""A reproduction as a page: sections of text, tables and plots."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

from mooncake_jax.metrics.table import number
from mooncake_jax.report.plots import svg

Cell = float | str | None


@dataclass(frozen=True)
class Section:
  """One experiment.

  Attributes:
    title: as a heading.
    text: paragraphs and tables, in order, as markdown.
    plots: figures by file name, drawn when the page is written.
    checks: what the paper says of the order, and whether it is so here.
  """

  title: str
  text: Sequence[str]
  plots: Mapping[str, Any] = field(default_factory=dict)
  checks: Mapping[str, bool] = field(default_factory=dict)


Experiment = Callable[[Any], Section]


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
  """A markdown table; numbers to three digits."""
  lines = [columns, ['---'] * len(columns), *[map(_cell, r) for r in rows]]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def deviation(ours: float | None, paper: float | None) -> str:
  """Ours against the paper's: '+12 %'."""
  if not ours or not paper:
    return '-'
  return f'{ours / paper - 1:+.0%}'.replace('%', ' %')


def points(ours: float, paper: float) -> str:
  """Difference of two shares in points: '+3.4'."""
  return f'{100 * (ours - paper):+.1f}'


def percent(share: float) -> str:
  return f'{100 * share:.1f}'


def write(path: Path, head: str, sections: Mapping[str, Section]) -> None:
  """Writes the page, and its plots into a folder beside it."""
  folder = path.with_suffix('')
  folder.mkdir(parents=True, exist_ok=True)
  parts = [head, _overview(sections)]
  for section in sections.values():
    parts += [f'## {section.title}', *section.text]
    for name, figure in section.plots.items():
      (folder / f'{name}.svg').write_text(svg(figure))
      parts.append(f'![{name}]({folder.name}/{name}.svg)')
    parts += [_checked(section)] if section.checks else []
  path.write_text('\n\n'.join(parts) + '\n')


def _overview(sections: Mapping[str, Section]) -> str:
  rows = [
    (section.title, what, 'yes' if holds else '**no**')
    for section in sections.values()
    for what, holds in section.checks.items()
  ]
  return table(('experiment', 'asked', 'holds here'), rows)


def _checked(section: Section) -> str:
  return '\n'.join(
    f'- {what}: {"yes" if holds else "**no**"}'
    for what, holds in section.checks.items()
  )


def _cell(value: Cell) -> str:
  if isinstance(value, str):
    return value
  if value is None or isinstance(value, int):
    return number(value)
  return f'{value:.3g}'

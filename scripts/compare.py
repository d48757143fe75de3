# SPDX-License-Identifier: Apache-2.0
"""Puts runs side by side: how their configs and their results differ.

  python scripts/compare.py RUN RUN... [--out compare.html]
  python scripts/compare.py A/seed0,A/seed1 B/seed0,B/seed1

Each is a results folder, of a run or of a sweep's point, or several with commas
between them: one system, run with several seeds. Tells which bindings differ,
all figures in columns, and for the main ones how much each run differs from the
first, with the interval that a bootstrap over requests and seeds gives. Where
runs have the tokens of their answers, also which share of the first run's each
gives too, up to the first that differs in an answer.
"""

import argparse
from collections.abc import Mapping
from collections.abc import Sequence
from itertools import takewhile
import json
from pathlib import Path
import sys

from mooncake_jax.metrics.bootstrap import columns
from mooncake_jax.metrics.bootstrap import Difference
from mooncake_jax.metrics.bootstrap import differences
from mooncake_jax.metrics.summary import Summary
from mooncake_jax.metrics.table import comparison
from mooncake_jax.metrics.table import number
from mooncake_jax.report.page import comparison_page
from mooncake_jax.report.records import read_records
from mooncake_jax.request import RequestRecord
from mooncake_jax.slo import SLO
from scripts import gin_source
from scripts.errors import one_line_errors

OPERATIVE = 'operative_config.gin'
Run = tuple[list[RequestRecord], Summary]


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('runs', nargs='+', metavar='FOLDER[,FOLDER...]')
  parser.add_argument(
    '--out', type=Path, help='default: compare.html in the last FOLDER'
  )
  args = parser.parse_args(argv)
  with one_line_errors():
    systems = {text: [*map(Path, text.split(','))] for text in args.runs}
    runs = {name: [*map(_read, of)] for name, of in systems.items()}
    configs = {name: config_of(of[0]) for name, of in systems.items()}
    out = args.out or [*systems.values()][-1][0] / 'compare.html'
    _tell(runs, configs, out)
  return 0


def _tell(
  runs: Mapping[str, Sequence[Run]],
  configs: Mapping[str, Mapping[str, str]],
  out: Path,
) -> None:
  """In words, tables and plots."""
  short = labels([*runs])
  firsts = {short[name]: of[0] for name, of in runs.items()}
  _tell_configs(configs)
  print(comparison({name: summary for name, (_, summary) in firsts.items()}))
  _tell_differences(runs)
  records = {name: found for name, (found, _) in firsts.items()}
  for name, share in same_tokens(records).items():
    print(f'tokens as in the first run: {name} {share:.3f}')
  out.write_text(comparison_page(' · '.join(firsts), firsts))
  print(f'\nplots: {out}')


def _read(folder: Path) -> Run:
  return (
    read_records(folder / 'records.jsonl'),
    Summary.from_dict(json.loads((folder / 'summary.json').read_text())),
  )


def labels(names: Sequence[str]) -> dict[str, str]:
  """Of systems: their first folders, as many of the last parts as tell them
  apart."""
  firsts = [Path(name.split(',')[0]).parts for name in names]
  for depth in range(1, max(map(len, firsts)) + 1):
    found = ['/'.join(parts[-depth:]) for parts in firsts]
    if len({*found}) == len(found):
      return dict(zip(names, found))
  return {name: name for name in names}


def config_of(folder: Path) -> dict[str, str]:
  """Value of each binding of a run's operative config; {} where it has none."""
  path = folder / OPERATIVE
  if not path.exists():
    return {}
  source = gin_source.Source()
  gin_source.read(path, source)
  return bindings_of(source)


def bindings_of(source: gin_source.Source) -> dict[str, str]:
  """The value of each binding, as a gin file writes it."""
  return {each.name: repr(each.value) for each in source.bindings}


def different(
  configs: Mapping[str, Mapping[str, str]],
) -> dict[str, list[str]]:
  """Values by binding, '-' where a run has none, of those that differ."""
  names = dict.fromkeys(name for of in configs.values() for name in of)
  values = {n: [of.get(n, '-') for of in configs.values()] for n in names}
  return {name: of for name, of in values.items() if len({*of}) > 1}


def _tell_configs(configs: Mapping[str, Mapping[str, str]]) -> None:
  found = different(configs)
  print('bindings that differ:' if found else 'the same bindings')
  for name, values in found.items():
    print(f'  {name}: {" | ".join(values)}')
  print()


def _tell_differences(runs: Mapping[str, Sequence[Run]]) -> None:
  """Of each system from the first; a star where 0 lies outside."""
  (first, base), *others = runs.items()
  short = labels([*runs])
  slo = SLO(base[0][1].slo_ttft_s, base[0][1].slo_tbt_s)
  of = {
    name: [columns(records, slo) for records, _ in each if records]
    for name, each in runs.items()
  }
  for name, _ in others:
    if of[first] and of[name]:
      print(f'\n{short[name]} - {short[first]}, 95 % of the bootstrap:')
      for figure, each in differences(of[first], of[name]).items():
        print(f'  {figure:28}{_shown(each)}')


def _shown(each: Difference) -> str:
  star = '  *' if each.is_sure else ''
  difference = each.other - each.first
  return (
    f'{number(difference):>11} [{number(each.low)}, {number(each.high)}]{star}'
  )


def same_tokens(
  runs: Mapping[str, Sequence[RequestRecord]],
) -> dict[str, float]:
  """Share of the first run's output tokens that each of the others repeats.

  Of requests by their names; tokens after the first that differs don't count.
  """
  first, *others = runs
  wanted = {r.request_id: r.output_tokens for r in runs[first]}
  total = sum(map(len, wanted.values()))
  if not total:
    return {}
  return {
    name: sum(
      _num_same(wanted.get(r.request_id, []), r.output_tokens)
      for r in runs[name]
    )
    / total
    for name in others
  }


def _num_same(wanted: Sequence[int], found: Sequence[int]) -> int:
  pairs = zip(wanted, found)
  return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


if __name__ == '__main__':
  sys.exit(main())

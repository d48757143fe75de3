# SPDX-License-Identifier: Apache-2.0
"""Puts runs side by side: their figures in columns, TTFT and TBT in one plot.

  python scripts/compare.py results/A results/B [--out compare.html]

Each is a results folder, of a run or of a sweep's point. Where runs have the
tokens of their answers, also which share of the first run's each gives too, up
to the first that differs in an answer.
"""

import argparse
from collections.abc import Mapping
from collections.abc import Sequence
from itertools import takewhile
import json
from pathlib import Path
import sys

from mooncake_jax.metrics.summary import Summary
from mooncake_jax.metrics.table import comparison
from mooncake_jax.report.page import comparison_page
from mooncake_jax.report.records import read_records
from mooncake_jax.request import RequestRecord
from scripts.errors import one_line_errors


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('folders', nargs='+', type=Path, metavar='FOLDER')
  parser.add_argument('--out', type=Path, default=Path('compare.html'))
  args = parser.parse_args(argv)
  with one_line_errors():
    runs = {
      folder.name: (
        read_records(folder / 'records.jsonl'),
        Summary.from_dict(json.loads((folder / 'summary.json').read_text())),
      )
      for folder in args.folders
    }
  print(comparison({name: summary for name, (_, summary) in runs.items()}))
  records = {name: found for name, (found, _) in runs.items()}
  for name, share in same_tokens(records).items():
    print(f'tokens as in the first run: {name} {share:.3f}')
  args.out.write_text(comparison_page(' · '.join(runs), runs))
  print(f'\nplots: {args.out}')
  return 0


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

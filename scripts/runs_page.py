# SPDX-License-Identifier: Apache-2.0
"""Writes docs/runs.md's table from the heads of configs/run/*.gin.

python scripts/runs_page.py
"""

from pathlib import Path
import re
import sys

from scripts.gin_source import ROOT

PAGE = ROOT / 'docs/runs.md'
BEGIN, END = '<!-- runs: scripts/runs_page.py -->\n', '<!-- end of runs -->'
KEYS = ('Took', 'Gave', 'Paper')


def main() -> int:
  PAGE.write_text(with_table(PAGE.read_text()))
  return 0


def with_table(text: str) -> str:
  """`text` with the table between its two marks made anew."""
  before, rest = text.split(BEGIN)
  _, after = rest.split(END)
  return f'{before}{BEGIN}{table()}{END}{after}'


def table() -> str:
  rows = ['| run | took | gave | in the paper |', '|---|---|---|---|']
  for path in sorted((ROOT / 'configs/run').glob('*.gin')):
    facts = head(path)
    if 'Gave' in facts:
      cells = (facts.get(key, '') for key in KEYS)
      rows.append(f'| `{path.stem}` | {" | ".join(cells)} |')
  return '\n'.join(rows) + '\n'


def head(path: Path) -> dict[str, str]:
  """'Took: ...', 'Gave: ...', 'Paper: ...' of a run file's first comment.

  Each may go on over lines and ends at a line that is empty or begins anew.
  """
  lines = []
  for line in path.read_text().splitlines():
    if not line.startswith('#'):
      break
    lines.append(line[1:].strip())
  found = re.split(rf'^({"|".join(KEYS)}):', '\n'.join(lines), flags=re.M)
  pairs = zip(found[1::2], found[2::2], strict=True)
  return {key: ' '.join(fact.split('\n\n')[0].split()) for key, fact in pairs}


if __name__ == '__main__':
  sys.exit(main())

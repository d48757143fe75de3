# SPDX-License-Identifier: Apache-2.0
"""The documentation: commands, links, the reference, and that it builds."""

from pathlib import Path
import re
import subprocess

import pytest

import commands
from scripts import reference

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / 'docs').glob('*.md'))
BUILDER = ROOT / '.venv-docs/bin/zensical'
SHOWN = [
  (page.name, command)
  for page in PAGES
  for command in commands.shown(page.read_text())
  # The others are not of this project alone.
  if command.startswith(('make', '.venv/bin/python scripts/'))
]


@pytest.mark.parametrize('page,command', SHOWN)
def test_a_command_names_what_there_is(page, command):
  commands.check(command)


@pytest.mark.parametrize('page', [*PAGES, ROOT / 'README.md'], ids=str)
def test_links_lead_somewhere(page):
  for link in re.findall(r'\]\(([^)\s]+)\)', page.read_text()):
    if not re.match(r'https?://|mailto:|#', link):
      assert (page.parent / link.split('#')[0]).exists(), link


def test_every_page_of_the_navigation_is_there():
  text = (ROOT / 'mkdocs.yml').read_text().split('\nnav:\n')[1]
  pages = re.findall(r'- ([\w/]+\.md)', text)
  assert len(pages) > 8
  written = {'reference/bindings.md', 'reference/modules.md'}
  assert all((ROOT / 'docs' / p).exists() for p in {*pages} - written)


def test_the_reference_has_every_parameter_that_configs_bind(tmp_path):
  assert reference.main(['--out', str(tmp_path)]) == 0
  page = (tmp_path / 'bindings.md').read_text()
  targets = reference.bound()
  assert 'mooncake_jax.cluster_spec.ClusterSpec' in targets
  assert 'scripts.assessment.spec.Assessment' in targets
  for name, target in targets.items():
    section = page.split(f'## `{name}`\n')[1].split('\n## ')[0]
    rows = re.findall(r'^\| `(\w+)` \|.*\| (.*) \|$', section, re.M)
    assert [row[0] for row in rows] == [*reference.parameters(target)]
  cluster = page.split('ClusterSpec`\n')[1].split('\n## ')[0]
  assert all(re.findall(r'^\| `\w+` \|.*\| (.*) \|$', cluster, re.M))
  modules = (tmp_path / 'modules.md').read_text()
  assert '## `mooncake_jax/serve.py`' in modules and '- `serve`: ' in modules


def test_the_reference_tells_one_parameter(capsys):
  assert reference.main(['chunk_tokens']) == 0
  lines = capsys.readouterr().out.splitlines()
  at = lines.index('ClusterSpec.chunk_tokens: int = 256')
  assert lines[at + 1] == '  prompt tokens prefilled at once (`prefill_chunk`).'
  reference.main(['ClusterSpec'])
  both = capsys.readouterr().out
  assert 'ClusterSpec.chunk_tokens' in both and 'ClusterSpec.host_bytes' in both
  with pytest.raises(SystemExit):
    reference.main(['chunk_token'])
  assert "nearest: 'chunk_tokens'" in capsys.readouterr().err


@pytest.mark.skipif(not BUILDER.exists(), reason='make docs')
def test_it_builds_without_a_warning():
  reference.main([])
  built = subprocess.run(
    [BUILDER, 'build', '--strict', '-f', 'mkdocs.yml'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert built.returncode == 0, built.stdout + built.stderr

# SPDX-License-Identifier: Apache-2.0
"""The loader builds what files say and names every mistake in one line."""

import pytest

from scripts.config import ConfigError
from scripts.config import load
from scripts.experiment import Experiment
from scripts.gin_source import ROOT
from tests import config_pieces as pieces

HEADER = """
from __gin__ import dynamic_registration
import tests.config_pieces as pieces
"""
INNER = 'pieces.Root.inner = @pieces.Inner()\n'
RUN = 'configs/run/sim_conversation.gin'  # which has two of RULES itself
RULES = sorted(path.name for path in (ROOT / 'configs/conductor').iterdir())


@pytest.fixture
def build(tmp_path):
  """Loads a file of these lines; returns the root and the operative text."""

  def _build(lines: str, *bindings: str):
    path = tmp_path / 'run.gin'
    path.write_text(HEADER + lines)
    return load(path, bindings, pieces.Root)

  return _build


@pytest.fixture
def fails(build):
  """The one line that a wrong file of these lines ends in."""

  def _fails(lines: str, *bindings: str) -> str:
    with pytest.raises(ConfigError) as caught:
      build(lines, *bindings)
    message = str(caught.value)
    assert '\n' not in message
    return message

  return _fails


def test_values_come_from_file_and_defaults(build):
  root, _ = build(INNER + 'pieces.Inner.num_tokens = 7\n')
  assert root == pieces.Root(inner=pieces.Inner(num_tokens=7))


def test_functions_macros_and_scopes_are_bound(build):
  root, _ = build(
    INNER
    + 'COUNT = 3\n'
    + 'pieces.Root.rows = @ones/pieces.rows()\n'
    + 'pieces.rows.count = %COUNT\n'
    + 'ones/pieces.rows.seed = 1\n'
  )
  assert root.rows == [1, 1, 1]


def test_a_function_can_be_bound_to_be_called_later(build):
  root, _ = build(
    INNER + 'pieces.Root.policy = @pieces.first\npieces.first.power = 2\n'
  )
  assert root.policy([3]) == 9


def test_extra_bindings_win_and_need_no_module(build):
  root, _ = build(
    INNER + 'pieces.Inner.num_tokens = 7\n',
    'pieces.Inner.ratio=1',
    'Inner.num_tokens = 8',
  )
  assert root.inner == pieces.Inner(num_tokens=8, ratio=1)


def test_an_include_is_overridden_by_the_file_that_includes(build, tmp_path):
  base = tmp_path / 'base.gin'
  base.write_text(HEADER + INNER + 'pieces.Inner.num_tokens = 1\n')
  root, _ = build(f"include '{base}'\npieces.Inner.num_tokens = 2\n")
  assert root.inner.num_tokens == 2


def test_the_operative_config_builds_the_same_again(build, tmp_path):
  root, operative = build(
    INNER + 'pieces.Root.sizes = (5,)\nN = 2\npieces.Inner.num_tokens = %N\n'
  )
  path = tmp_path / 'operative.gin'
  path.write_text(operative)
  assert 'pieces.Inner.ratio = 0.5' in operative
  assert load(path, (), pieces.Root)[0] == root


def test_unknown_names_come_with_the_nearest(fails):
  assert fails('pieces.Rooot.limit = 1\n').endswith(
    "run.gin:4: pieces.Rooot.limit: pieces has no 'Rooot'; nearest: 'Root'"
  )
  assert "nearest: 'pieces'" in fails('peces.Root.limit = 1\n')
  assert "nearest: 'num_tokens'" in fails('pieces.Inner.num_token = 1\n')
  assert "nearest: 'Inner'" in fails('pieces.Root.inner = @pieces.Iner()\n')
  assert "nearest: 'COUNT'" in fails('COUNT = 1\npieces.Root.limit = %CONT\n')


@pytest.mark.parametrize(
  'binding, wanted',
  [
    ('pieces.Root.mode=device', "Root.mode = device: text needs quotes: 'dev"),
    ('num_token=1', "nothing that is built uses it; nearest: 'pieces.Inner.nu"),
    ('inner.num_tokens=1', "inner.num_tokens: no 'inner'; nearest: 'Inner'"),
    ('Root.policy=@my.own', "@my.own: 'my' is not imported"),
  ],
)
def test_a_mistake_on_the_command_line_says_what_was_meant(
  fails, binding, wanted
):
  assert wanted in fails(INNER + 'pieces.Inner.num_tokens = 1\n', binding)


def test_what_is_not_bound_is_named(fails):
  assert fails('pieces.Root.limit = 1\n').endswith('Root: bind inner')


@pytest.mark.parametrize(
  'path, wanted',
  [
    ('sim_cpp', "nearest: 'configs/run/sim_cpp.gin'"),
    ('configs/run/overload.gin', "nearest: 'sim_overload.gin'"),
    (
      'configs/hardware/h100_x8.gin',
      'ModelConfig: bind family, vocab_size.*'
      'or include a file of configs/model',
    ),
    ('configs/assess/h100.gin', 'for scripts/assess.py'),
    ('configs/sweep/overload.gin', 'for scripts/sweep.py'),
  ],
)
def test_another_kind_of_file_is_told_what_it_is_for(path, wanted):
  with pytest.raises(ConfigError, match=wanted):
    load(path, (), Experiment)


def test_a_module_may_lie_beside_the_file_that_imports_it(build, tmp_path):
  (tmp_path / 'module_beside_a_run.py').write_text('def last(c): return c[-1]')
  root, _ = build(
    'import module_beside_a_run as own\n'
    + INNER
    + 'pieces.Root.policy = @own.last\n'
  )
  assert root.policy([1, 2]) == 2


def test_unknown_modules_and_files_come_with_the_nearest(fails):
  message = fails('import mooncake_jax.sloo as slo\n')
  assert "'mooncake_jax.sloo'; nearest: 'mooncake_jax.slo'" in message
  assert 'run.gin:4: include no/such.gin' in fails("include 'no/such.gin'\n")
  with pytest.raises(ConfigError, match='nearest'):
    load('configs/run/quickstrat.gin', (), pieces.Root)


@pytest.mark.parametrize(
  'line, wanted',
  [
    ("pieces.Inner.num_tokens = '7'", "'7' is not of type int"),
    ('pieces.Inner.num_tokens = 7.5', '7.5 is not of type int'),
    ('pieces.Inner.num_tokens = True', 'True is not of type int'),
    ('pieces.Inner.ratio = None', 'None is not of type float'),
    ('pieces.Root.sizes = (1, 2.5)', '(1, 2.5) is not of type tuple[int'),
    ('pieces.Root.sizes = 3', '3 is not of type tuple[int'),
    ("pieces.Root.mode = 'real'", "'real' is not of type Literal['device'"),
    ('pieces.Root.inner = @pieces.Other()', '@pieces.Other() is not of type'),
    ('pieces.Root.inner = 3', '3 is not of type Inner'),
    ('pieces.Root.limit = @pieces.first', '@pieces.first is not of type int'),
  ],
)
def test_wrong_types_are_named(fails, line, wanted):
  assert wanted in fails(line + '\n')


def test_two_bindings_of_one_key_in_one_file_contradict(fails):
  message = fails(
    INNER + 'pieces.Inner.ratio = 1.0\npieces.Inner.ratio = 2.0\n'
  )
  assert 'run.gin:6: pieces.Inner.ratio: already bound in' in message
  assert 'already bound' in fails(INNER, 'Inner.ratio=1.0', 'Inner.ratio=2.0')


def test_what_nothing_uses_is_an_error(fails):
  assert 'nothing that is built uses it' in fails(
    INNER + "pieces.Other.name = 'x'\n"
  )
  assert 'LEFT: bound, but nothing' in fails(INNER + 'LEFT = 3\n')
  assert 'nothing' in fails(INNER + 'far/pieces.Inner.ratio = 1.0\n')


def test_what_a_dataclass_refuses_is_told_in_one_line(fails):
  assert 'Root.limit=-1 must be >= 0' in fails(
    INNER + 'pieces.Root.limit = -1\n'
  )


def test_a_missing_parameter_is_told_in_one_line(fails):
  assert 'inner' in fails('pieces.Root.limit = 1\n')


def test_syntax_and_shape_of_files_and_bindings(fails, tmp_path):
  assert 'run.gin' in fails('pieces.Root.limit = = 1\n')
  assert 'must read X.y=value' in fails(INNER, 'Inner.ratio')
  headless = tmp_path / 'headless.gin'
  headless.write_text('import tests.config_pieces\n')
  with pytest.raises(ConfigError, match='dynamic_registration'):
    load(headless, (), pieces.Root)
  circle = tmp_path / 'circle.gin'
  circle.write_text(f"include '{circle}'\n")
  with pytest.raises(ConfigError, match='includes itself'):
    load(circle, (), pieces.Root)


def test_a_run_file_is_found_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  experiment, _ = load('configs/run/sim_cpp.gin', [], Experiment)
  assert experiment.cluster.stages == 4


@pytest.mark.parametrize(
  'name', [name for name in RULES if name not in (ROOT / RUN).read_text()]
)
def test_a_run_takes_any_rules_of_the_conductor(name, tmp_path):
  path = tmp_path / 'run.gin'
  path.write_text(f"include '{RUN}'\ninclude 'configs/conductor/{name}'\n")
  usual, other = (load(each, (), Experiment)[0] for each in (RUN, path))
  is_usual = name == 'admit_early_rejection.gin'  # a run has it anyway
  same = (usual.conductor, usual.slo) == (other.conductor, other.slo)
  assert same is is_usual

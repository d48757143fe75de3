# SPDX-License-Identifier: Apache-2.0
"""What a run leaves: files that read back the same and open elsewhere."""

from dataclasses import replace
import json
from xml.etree import ElementTree

import pytest

from mooncake_jax import events
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.report import plots
from mooncake_jax.report.environment import environment
from mooncake_jax.report.folder import Results
from mooncake_jax.report.folder import write_results
from mooncake_jax.report.prompt_chart import longest_prompt
from mooncake_jax.report.prompt_chart import prompt_bars
from mooncake_jax.report.records import read_journal
from mooncake_jax.report.records import read_records
from mooncake_jax.report.records import write_journal
from mooncake_jax.report.records import write_records
from mooncake_jax.report.timeline import timeline
from mooncake_jax.request import Emitted
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenLogprobs
from mooncake_jax.request import TokenSegment
from mooncake_jax.serve import Decision
from mooncake_jax.serve import Journal
from mooncake_jax.slo import SLO
from scripts import compare


def served(name: str, start_s: float = 0.0) -> RequestRecord:
  """A request with every time stamp, one second apart."""
  return RequestRecord(
    name,
    prompt_tokens=100,
    arrival_s=start_s,
    prefill='prefill0',
    decode='decode1',
    outcome='completed',
    reused_tokens={'local_host': 64},
    placed_s=start_s,
    fetch_start_s=start_s + 1,
    prefill_start_s=start_s + 2,
    prefill_done_s=start_s + 3,
    kv_arrived_s=start_s + 4,
    first_token_s=start_s + 3,
    finished_s=start_s + 6,
    segments=[
      TokenSegment(start_s + 3, 0.0, 1),
      TokenSegment(start_s + 4.5, 0.5, 4),
    ],
    output_tokens=[1, 2, 3, 4, 5],
  )


def rejected(name: str) -> RequestRecord:
  return RequestRecord(name, 10, 0.0, outcome='rejected', reason='ttft')


JOURNAL: Journal = [
  events.BlocksStored(1.0, 'prefill0', (b'\x01\xff', b'\x02'), 'host'),
  events.TokensEmitted(
    2.0,
    'decode0',
    Emitted(
      (('a', 0), ('b', 1)),
      TokenSegment(1.5, 0.25, 1),
      (7, 8),
      (TokenLogprobs(-0.5, ((7, -0.5),)), None),
    ),
  ),
  events.Failed(3.0, 'a', 1, 'decode0', 'timeout'),
  Decision(2.5, 'a', Placement('a', 0, 'prefill0', 'decode0', 2)),
  Decision(2.5, 'b', Rejection('b', 'ttft', 31.0, 0.1)),
  events.InstanceJoined(4.0, 'decode2', 'decode'),
  events.WorkDone(
    5.0, 'prefill0', 'a', 0, 'chunk', 'completed', 1.0, ((1.0, 2.0),), 0, 8
  ),
]


def test_records_read_back_as_they_were(tmp_path):
  records = [served('a'), rejected('b')]
  write_records(tmp_path / 'records.jsonl', records)
  assert read_records(tmp_path / 'records.jsonl') == records


def test_a_journal_reads_back_as_it_was(tmp_path):
  write_journal(tmp_path / 'events.jsonl', JOURNAL)
  assert read_journal(tmp_path / 'events.jsonl') == JOURNAL


@pytest.mark.parametrize(
  'line, wanted',
  [
    ('{"event": "Nothing"}', "jsonl:1: event='Nothing' is not an event"),
    ('{"event": "Failed", "when": 1}', "jsonl:1: Failed has no field 'when'"),
    ('{"event": "InstanceLost"}', 'jsonl:1: InstanceLost: '),
    ('{', 'jsonl:1: not JSON'),
    ('5', 'jsonl:1: not a JSON object'),
  ],
)
def test_a_broken_line_is_named(tmp_path, line, wanted):
  path = tmp_path / 'events.jsonl'
  path.write_text(line + '\n')
  with pytest.raises(ValueError, match='events.') as caught:
    read_journal(path)
  assert wanted in str(caught.value)


def test_a_timeline_has_every_phase_on_its_instance():
  trace = timeline([served('a'), rejected('b')])['traceEvents']
  names = {e['pid']: e['args']['name'] for e in trace if e['ph'] == 'M'}
  phases = [
    (names[e['pid']], e['cat'], e['ts'] / 1e6, e['dur'] / 1e6)
    for e in trace
    if e['ph'] == 'X'
  ]
  assert phases == [
    ('decode1', 'transfer', 3, 1),
    ('decode1', 'decode', 4, 2),
    ('prefill0', 'queue', 0, 1),
    ('prefill0', 'fetch', 1, 1),
    ('prefill0', 'prefill', 2, 1),
  ]
  assert {e['ph'] for e in trace if e.get('id') == 'a'} == {'s', 'f'}


def test_overlapping_requests_lie_in_different_rows():
  records = [served('a'), served('b', 1.5), served('c', 3.0)]
  rows = {
    e['name']: e['tid']
    for e in timeline(records)['traceEvents']
    if e.get('cat') == 'prefill'
  }
  assert rows == {'prefill a': 0, 'prefill b': 1, 'prefill c': 0}


def work(step, started_s, time_s, chunk=0, spans=()):
  start, stop = (8 * chunk, 8 * chunk + 8) if step == 'chunk' else (0, 0)
  times = (time_s, 'prefill0', 'a', 0, step, 'completed', started_s)
  return events.WorkDone(*times, spans, start, stop)


WORKS = [
  work('chunk', 0, 2, 0, ((0.0, 1.0), (1.0, 2.0))),
  work('chunk', 1, 3, 1, ((1.0, 2.0), (2.0, 3.0))),
  work('chunk', 2, 4, 2, ((2.0, 3.0), (3.0, 4.0))),
  work('handoff', 2, 4),
  work('handoff', 3, 5),
]


def test_a_timeline_has_a_row_a_stage_and_none_overlaps():
  trace = timeline([served('a')], WORKS)['traceEvents']
  pids = {
    e['args']['name']: e['pid'] for e in trace if e['name'] == 'process_name'
  }
  rows = {
    (e['pid'], e['tid']): e['args']['name']
    for e in trace
    if e['name'] == 'thread_name'
  }
  assert [*rows.values()].count('handoff') == 2  # they overlap
  stages, transfers = pids['prefill0 stages'], pids['prefill0 transfers']
  assert {r for (pid, _), r in rows.items() if pid == stages} == {
    'stage 0',
    'stage 1',
  }
  ends: dict[tuple[int, int], float] = {}
  for e in trace:
    if e['ph'] == 'X' and e['pid'] in (stages, transfers):
      row = e['pid'], e['tid']
      assert e['ts'] >= ends.get(row, 0.0) and row in rows
      ends[row] = e['ts'] + e['dur']


def test_a_chart_shows_the_longest_prompt_from_its_begin():
  other = replace(WORKS[0], request_id='b', spans=((9.0, 10.0),))
  works = longest_prompt([other, *WORKS])
  assert works == WORKS
  bars = prompt_bars(works)
  assert [bar.row for bar in bars] == ['stage 0'] * 3 + ['stage 1'] * 3 + [
    'handoff'
  ] * 2
  assert bars[0].start_s == 0 and max(bar.stop_s for bar in bars) == 5
  assert longest_prompt([]) == [] and prompt_bars([]) == []


def test_plots_are_valid_svg_and_the_same_each_time():
  drawn = plots.distribution([0.1, 0.4], 0.3, 'TTFT')
  assert ElementTree.fromstring(drawn).tag.endswith('svg')
  assert drawn == plots.distribution([0.1, 0.4], 0.3, 'TTFT')
  ElementTree.fromstring(plots.distribution([], None, 'nobody was served'))
  ElementTree.fromstring(plots.shares({'local_host': 0.4}, 'hits'))


def test_runs_stand_side_by_side(tmp_path, capsys):
  for name, records in (('a', [served('x')]), ('b', [served('y', 9.0)] * 2)):
    results = Results(
      name, '', {}, records, [], summarize(records, SLO(9, 0.3)), SLO(9, 0.3)
    )
    write_results(tmp_path / name, results, with_page=False)
  out = tmp_path / 'both.html'
  folders = [str(tmp_path / name) for name in 'ab']
  assert compare.main([*folders, '--out', str(out)]) == 0
  lines = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert ['a', 'b'] in lines and ['offered', '1', '2'] in lines
  told = compare.same_tokens(
    {
      'a': [served('x')],
      'b': [replace(served('x'), output_tokens=[1, 2, 9, 4])],
    }
  )
  assert told == {'b': 0.4}
  html = out.read_text()
  assert html.count('<svg') == 2 and html.count('>a</text>') == 2
  with pytest.raises(SystemExit):
    compare.main([str(tmp_path / 'none')])


def test_the_environment_tells_versions_and_devices():
  found = environment(['cpu:0'], 3, '2026-01-01T00:00:00')
  assert found['devices'] == ['cpu:0'] and found['seed'] == 3
  assert found['versions']['jax']
  json.dumps(found)


def test_a_results_folder_is_complete_and_self_contained(tmp_path):
  records = [served('a'), rejected('b')]
  summary = summarize(records, SLO())
  results = Results(
    title='a run <1>',
    config='# nothing bound\n',
    environment=environment([], None, ''),
    records=records,
    journal=[*JOURNAL, *WORKS],
    summary=summary,
    slo=SLO(),
  )
  write_results(tmp_path / 'run', results)
  assert {p.name for p in (tmp_path / 'run').iterdir()} == {
    'operative_config.gin',
    'environment.json',
    'records.jsonl',
    'events.jsonl',
    'summary.json',
    'timeline.json',
    'report.html',
  }
  assert json.loads((tmp_path / 'run/summary.json').read_text()) == (
    summary.to_dict()
  )
  html = (tmp_path / 'run/report.html').read_text()
  assert html.count('<svg') == 4 and 'a run &lt;1&gt;' in html
  assert 'src=' not in html and '@import' not in html

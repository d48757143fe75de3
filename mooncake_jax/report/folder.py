# SPDX-License-Identifier: Apache-2.0
"""The results folder: everything about one run, each thing in one file.

operative_config.gin  what was bound and what was left at its default
environment.json      versions, devices, commit, seed
records.jsonl         what became of each request
events.jsonl          what the cluster told, enough to replay placements
summary.json          every figure that the table prints
timeline.json         opens in Perfetto
report.html           the same for reading, without other files
"""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
import json
from pathlib import Path
from typing import Any

from mooncake_jax.events import WorkDone
from mooncake_jax.metrics.summary import Summary
from mooncake_jax.report.page import page
from mooncake_jax.report.records import write_journal
from mooncake_jax.report.records import write_records
from mooncake_jax.report.timeline import timeline
from mooncake_jax.request import RequestRecord
from mooncake_jax.serve import Journal
from mooncake_jax.slo import SLO


@dataclass(frozen=True)
class Results:
  """What a run gave.

  Attributes:
    config: the operative config, as text.
    environment: see `report.environment`.
  """

  title: str
  config: str
  environment: Mapping[str, Any]
  records: Sequence[RequestRecord]
  journal: Journal
  summary: Summary
  slo: SLO


def write_results(
  folder: Path, results: Results, with_page: bool = True
) -> None:
  """Writes the seven files; the folder is made where it is missing.

  The page is most of the work: a sweep over many short runs does without.
  """
  folder.mkdir(parents=True, exist_ok=True)
  works = [e for e in results.journal if isinstance(e, WorkDone)]
  lines = timeline(results.records, works)
  (folder / 'operative_config.gin').write_text(results.config)
  _write_json(folder / 'environment.json', results.environment)
  write_records(folder / 'records.jsonl', results.records)
  write_journal(folder / 'events.jsonl', results.journal)
  _write_json(folder / 'summary.json', results.summary.to_dict())
  _write_json(folder / 'timeline.json', lines, indent=None)
  if with_page:
    (folder / 'report.html').write_text(_page(results, works))


def _page(results: Results, works: Sequence[WorkDone]) -> str:
  return page(
    results.title,
    results.records,
    results.summary,
    results.slo,
    results.config,
    results.environment,
    works,
  )


def _write_json(path: Path, value: Any, indent: int | None = 2) -> None:
  path.write_text(json.dumps(value, indent=indent) + '\n')

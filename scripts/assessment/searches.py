# SPDX-License-Identifier: Apache-2.0
"""Goodputs of many experiments at once, each in a process of its own."""

from collections.abc import Iterable
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from dataclasses import replace
import multiprocessing
import os
from typing import Generic
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from mooncake_jax.metrics.summary import summarize
from mooncake_jax.metrics.summary import Summary
from scripts.capacity import at_rate
from scripts.capacity import requests_per_s
from scripts.capacity import search
from scripts.experiment import Experiment
from scripts.serving import backends
from scripts.serving import prepare
from scripts.serving import serve_once

K = TypeVar('K')
NEAR = 1.2  # step of a search that begins where the answer is expected


@dataclass(frozen=True)
class Job:
  """One search, or one run.

  Attributes:
    start_scale: where it begins, of the workload's own rate.
    searches: else it is run there once.
    near: whether the goodput is expected about there.
    most_scale: the fastest rate that is tried.
    warmup: so many of the first requests do not count.
  """

  experiment: Experiment
  target: float
  tolerance: float
  start_scale: float = 1.0
  searches: bool = True
  near: bool = False
  most_scale: float = 64.0
  warmup: int = 0


@dataclass(frozen=True)
class Found:
  """What a job gave.

  Attributes:
    requests_per_s: the goodput, or the rate that was run; 0 if none will do.
    scale: that rate, of the workload's own.
    summary: at that rate, or the first that was run.
    first: at the first rate.
  """

  requests_per_s: float
  scale: float
  summary: Summary
  first: Summary


class Pool(Generic[K]):
  """Runs jobs, all cores at once."""

  def __init__(self, workers: int = 0):
    self._workers = workers or os.cpu_count() or 1

  def run(self, jobs: Mapping[K, Job], label: str) -> dict[K, Found]:
    """What each job gave, in their order."""
    console = Console(force_jupyter=False)
    with Progress(console=console, transient=True) as bar:
      task = bar.add_task(label, total=len(jobs))
      found = []
      for each in self._all(jobs.values()):
        found.append(each)
        bar.advance(task)
    return dict(zip(jobs, found))

  def _all(self, jobs: Iterable[Job]) -> Iterable[Found]:
    if self._workers == 1:
      yield from map(run_job, jobs)
      return
    context = multiprocessing.get_context('spawn')
    with ProcessPoolExecutor(self._workers, context) as pool:
      yield from pool.map(run_job, jobs)


def run_job(job: Job) -> Found:
  """Searches or runs, in this process."""
  if not job.searches:
    return _run_once(job)
  summaries: dict[float, Summary] = {}
  capacity = search(
    job.experiment,
    job.target,
    job.tolerance,
    job.most_scale,
    summaries.__setitem__,
    min(job.start_scale, job.most_scale),
    step=NEAR if job.near else 2.0,
    warmup=job.warmup,
  )
  first = next(iter(summaries.values()))
  rate = capacity.found.requests_per_s
  if rate is None:
    return Found(0.0, 0.0, first, first)
  return Found(
    rate, rate / capacity.native_requests_per_s, summaries[rate], first
  )


def _run_once(job: Job) -> Found:
  experiment = job.experiment
  config = experiment.model.read_config()
  prepared = prepare(experiment, config)
  rate = requests_per_s(prepared.requests) * job.start_scale
  faster = replace(prepared, requests=at_rate(prepared.requests, rate))
  with backends(experiment, config) as make_backend:
    records = serve_once(experiment, config, faster, make_backend()).records
  summary = summarize(records[job.warmup :], experiment.slo)
  return Found(rate, job.start_scale, summary, summary)

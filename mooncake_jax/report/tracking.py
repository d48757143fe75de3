# SPDX-License-Identifier: Apache-2.0
"""A run's figures for TensorBoard or Weights & Biases, for who asks for it.

Needs a package that nothing else does: pip install 'mooncake-jax[tracking]'.
Whatever comes of it, the results folder has all of that and more.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from typing import get_args
from typing import Literal
from typing import Protocol

from mooncake_jax.metrics.latency import tbt_tail_s
from mooncake_jax.metrics.summary import Summary
from mooncake_jax.metrics.table import flat
from mooncake_jax.request import RequestRecord

TrackerName = Literal['tensorboard', 'wandb']
TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)
# What writes a tracker's files.
PACKAGES = {'tensorboard': 'tensorboardX', 'wandb': 'wandb'}


class Tracker(Protocol):
  """Where figures go."""

  def log(self, figures: Mapping[str, float], step: int) -> None:
    """Figures after so many requests have ended."""
    ...

  def close(self) -> None: ...


def require(name: TrackerName) -> Any:
  """The package of a tracker.

  Raises:
    ValueError: it is not installed.
  """
  try:
    return import_module(PACKAGES[name])
  except ImportError:
    raise ValueError(
      f'--track {name} needs {PACKAGES[name]}: '
      "pip install 'mooncake-jax[tracking]'"
    ) from None


def track(
  name: TrackerName,
  folder: Path,
  title: str,
  records: Sequence[RequestRecord],
  summary: Summary,
) -> None:
  """Writes a run's requests, in the order of their ends, and its summary.

  TensorBoard's files go to `folder`/tensorboard; Weights & Biases takes its
  own settings (WANDB_MODE=offline, WANDB_PROJECT), its files go to `folder`.

  Raises:
    ValueError: the package is not installed.
  """
  tracker = _OPEN[name](require(name), folder, title)
  ended = [r for r in records if r.finished_s is not None]
  ended.sort(key=lambda record: record.finished_s or 0.0)
  for step, record in enumerate(ended, 1):
    tracker.log(_of_request(record), step)
  figures = flat(summary.to_dict()).items()
  known = {f'summary/{k}': float(v) for k, v in figures if v is not None}
  tracker.log(known, len(ended))
  tracker.close()


def _of_request(record: RequestRecord) -> dict[str, float]:
  reused = sum(record.reused_tokens.values()) / max(record.prompt_tokens, 1)
  figures = {
    'finished_s': record.finished_s,
    'ttft_s': record.ttft_s,
    'tbt_tail_s': tbt_tail_s(record),
    'reused': reused if record.reuse_known else None,
    'completed': float(record.outcome == 'completed'),
  }
  return {f'request/{k}': v for k, v in figures.items() if v is not None}


class _TensorBoard:
  def __init__(self, package: Any, folder: Path, title: str):
    self._writer = package.SummaryWriter(str(folder / 'tensorboard'))
    self._writer.add_text('title', title)

  def log(self, figures: Mapping[str, float], step: int) -> None:
    for name, value in figures.items():
      self._writer.add_scalar(name, value, step)

  def close(self) -> None:
    self._writer.close()


class _Wandb:
  def __init__(self, package: Any, folder: Path, title: str):
    self._run = package.init(dir=str(folder), name=title)

  def log(self, figures: Mapping[str, float], step: int) -> None:
    self._run.log(dict(figures), step=step)

  def close(self) -> None:
    self._run.finish()


_OPEN = {'tensorboard': _TensorBoard, 'wandb': _Wandb}

# SPDX-License-Identifier: Apache-2.0
"""A prefill chunk from its start to its end, on whatever stages it runs."""

from collections.abc import Callable
import threading

import numpy as np

from mooncake_jax.backend import Completion
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Status
from mooncake_jax.backend import WorkId
from mooncake_jax.engine.progress import Layers
from mooncake_jax.model import logprobs
from mooncake_jax.request import TokenLogprobs

# Calls back once what a chunk waits for is done with layers, or by an error.
When = Callable[[Layers, Callable[[str], None]], None]


class ChunkRun:
  """One chunk: how far it is on all stages, and how it ends. Any thread.

  It ends once: 'completed' after its last group, else as soon as none of its
  groups is on a device, for until then they write its pages.
  """

  def __init__(
    self,
    work_id: WorkId,
    chunk: PrefillChunk,
    now_s: Callable[[], float],
    computed: Callable[[Layers], None],
    end: Callable[[Completion], None],
    poke: Callable[[], None],
  ):
    """Makes a run that has not begun.

    Args:
      computed: called on an owner's thread when the program that computes a
        layer range was dispatched.
      end: takes the completion.
      poke: makes the owners look again: it is over.
    """
    self.work_id = work_id
    self.chunk = chunk
    self.computed = computed
    self._now_s = now_s
    self._end = end
    self._poke = poke
    self._lock = threading.Lock()
    self._num_flying = 0
    self._why: tuple[Status, str] | None = None
    self._token: int | None = None
    self._logprobs: tuple[TokenLogprobs, ...] = ()
    self._is_ended = False
    self._spans: list[tuple[float, float]] = []

  @property
  def is_stopped(self) -> bool:
    """Whether nothing of it is to be dispatched any more."""
    return self._why is not None

  def begin(self) -> bool:
    """Counts a group that is about to be dispatched; False once stopped."""
    with self._lock:
      if self._why is not None:
        return False
      self._num_flying += 1
      return True

  def landed(self) -> None:
    """A group has left the device."""
    with self._lock:
      self._num_flying -= 1
    self._end_if_over()

  def left_stage(self, started_s: float, ended_s: float) -> None:
    """A stage is through with it."""
    self._spans.append((started_s, ended_s))

  def complete(self, report_R: np.ndarray | None) -> None:
    """Its last group was computed, and told of a token if it drew one."""
    sampling = self.chunk.sampling
    if report_R is not None and sampling is not None:
      self._token = int(logprobs.tokens(report_R))
      if sampling.logprobs is not None:
        self._logprobs = (logprobs.of_row(report_R, sampling.logprobs),)
    self.stop('completed', '')

  def stop(self, status: Status, error: str) -> None:
    """Ends it early, unless something else did."""
    with self._lock:
      self._why = self._why or (status, error)
    self._poke()
    self._end_if_over()

  def cancel(self) -> None:
    """Makes it end as 'cancelled' unless its last group was computed."""
    self.stop('cancelled', 'cancelled')

  def _end_if_over(self) -> None:
    with self._lock:
      if self._why is None or self._num_flying or self._is_ended:
        return
      self._is_ended = True
    now_s = self._now_s()
    spans = tuple(self._spans)
    self._end(
      Completion(
        self.work_id,
        self._why[0],
        spans[0][0] if spans else now_s,
        spans[-1][1] if spans else now_s,
        self._why[1],
        token=self._token,
        spans=spans,
        logprobs=self._logprobs,
      )
    )

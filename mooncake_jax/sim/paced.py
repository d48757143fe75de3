# SPDX-License-Identifier: Apache-2.0
"""PacedBackend: a simulation at the pace of the wall clock, for live clients.

Virtual time never runs ahead of the wall's, and decode works tell tokens as
their time comes, as devices do. Where the loop is slower than that, virtual
time falls behind, and nothing is left out.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import threading
import time

from mooncake_jax.backend import Completion
from mooncake_jax.costs.model import CostModel
from mooncake_jax.sim.decoding import Decoding
from mooncake_jax.sim.shared_device import SharedDevice
from mooncake_jax.sim.virtual import VirtualBackend

# The loop of a server sleeps no longer at once: a clock may be set.
LONGEST_SLEEP_S = 1.0
LEAST_TICK_S = 0.002


class PacedBackend(VirtualBackend):
  """`VirtualBackend` whose `wait` takes as long as it says."""

  def __init__(
    self,
    costs: CostModel,
    stage_layers: Sequence[int],
    *,
    instances: Mapping[str, CostModel] | None = None,
    partners: Mapping[str, str] | None = None,
    boundary_s: float = 0.0,
    least_tick_s: float = LEAST_TICK_S,
    clock: Callable[[], float] = time.perf_counter,
  ):
    """See `VirtualBackend`; time 0 is now.

    Args:
      least_tick_s: tokens that come closer together are told together.
      clock: seconds, never going back.
    """
    super().__init__(
      costs,
      stage_layers,
      instances=instances,
      partners=partners,
      boundary_s=boundary_s,
    )
    self._least_tick_s = least_tick_s
    self._wall_s = clock
    self._start_s = clock()
    self._told_s = 0.0
    self._woken = threading.Event()

  def wait(self, until_s: float | None) -> list[Completion]:
    """See `Backend`; sleeps until it is time, or `wake`."""
    while True:
      reached_s = self._reach(until_s)
      ended = super().wait(reached_s)
      completions = [*self._progress(), *ended]
      if until_s is None and self._next_s() is None:
        return completions
      is_over = until_s is not None and reached_s >= until_s
      if completions or is_over or self._woken.is_set():
        self._woken.clear()
        return completions
      self._woken.wait(self._patience_s(until_s))

  def wake(self) -> None:
    """See `Backend`. Any thread may call."""
    self._woken.set()

  def _reach(self, until_s: float | None) -> float:
    """How far virtual time may go now."""
    elapsed_s = max(self._wall_s() - self._start_s, self._clock.now_s)
    return elapsed_s if until_s is None else min(elapsed_s, until_s)

  def _next_s(self) -> float | None:
    """When something happens that was begun."""
    due_s = self._clock.next_s
    coming_s = [work.next_token_s for work in self._works_of_decode()]
    tokens_s = [time_s for time_s in coming_s if time_s is not None]
    if not tokens_s:
      return due_s
    token_s = max(min(tokens_s), self._told_s + self._least_tick_s)
    return token_s if due_s is None else min(due_s, token_s)

  def _patience_s(self, until_s: float | None) -> float:
    times_s = [t for t in (until_s, self._next_s()) if t is not None]
    left_s = min(times_s) - (self._wall_s() - self._start_s)
    return min(max(left_s, 0.0), LONGEST_SLEEP_S)

  def _progress(self) -> list[Completion]:
    """Tokens whose time has come, of decode works that go on."""
    now_s = self._clock.now_s
    if now_s < self._told_s + self._least_tick_s:
      return []
    told = [work.progress(now_s) for work in self._works_of_decode()]
    found = [completion for completion in told if completion is not None]
    if found:
      self._told_s = now_s
    return found

  def _works_of_decode(self) -> list[Decoding | SharedDevice]:
    return [*self._decoding.values(), *self._shared.values()]

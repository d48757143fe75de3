# SPDX-License-Identifier: Apache-2.0
"""What the Conductor advises: heat and roles over one view."""

import numpy as np

from mooncake_jax.conductor.advice import Advice
from mooncake_jax.conductor.heat import Heat
from mooncake_jax.conductor.roles import Roles
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.view import View
from mooncake_jax.request import Placement
from mooncake_jax.request import Request


class Adviser:
  """Follows placements; nothing where the spec wants no advice."""

  def __init__(self, rules: ConductorSpec, view: View):
    self._view = view
    block_bytes = view.layout.block_bytes
    self._heat = rules.replication and Heat(rules.replication, block_bytes)
    self._roles = rules.roles and Roles(rules.roles)

  def placed(
    self, request: Request, placement: Placement, now_s: float
  ) -> None:
    """A request went somewhere."""
    if self._heat and placement.reused_blocks:
      keys = request.block_keys[: placement.reused_blocks]
      self._heat.ask(keys, now_s)
    if self._roles:
      decode_s = self._decode_s(request, placement)
      self._roles.placed(placement.prefill_s, decode_s, now_s)

  def advise(self, now_s: float) -> list[Advice]:
    """What is worth doing now; it is taken to be done."""
    view, advice = self._view, []
    if not self._heat and not self._roles:
      return advice
    queue_s_I = view.prefill.queue_s_I(now_s)
    prefill = _idle_first(view.prefill.names, view.prefill.accepts_I, queue_s_I)
    if self._heat:
      advice += self._heat.advise(view.index, prefill, now_s)
    if self._roles:
      decode = _idle_first(
        view.decode.names, view.decode.accepts_I, view.decode.rows_I
      )
      change = self._roles.advise(prefill, decode, now_s)
      if change is not None:
        advice.append(change)
    return advice

  def _decode_s(self, request: Request, placement: Placement) -> float:
    """Seconds of a whole decode instance that the request will take."""
    view, loads = self._view, self._view.decode
    i, output = loads.row[placement.decode], view.lengths.mean
    room = (request.num_prompt_tokens + output) / loads.capacity_tokens_I[i]
    share = max(float(room), 1 / int(loads.max_batch_I[i]))
    return share * output * loads.step_s_I.item(i)


def _idle_first(
  names: list[str], accepts_I: np.ndarray, load_I: np.ndarray
) -> list[str]:
  order = np.argsort(load_I, kind='stable')
  return [names[i] for i in order if accepts_I[i]]

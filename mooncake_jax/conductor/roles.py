# SPDX-License-Identifier: Apache-2.0
"""How many instances should prefill and how many decode, with hysteresis.

A pool's load is a share: of their time that prefill instances are given work
for, and of the time of their rows or KVCache room, whichever is scarcer, that
decode instances are. What is given counts, not what waits: a long queue for
prefill must not look like full decode instances. The pool that is nearer to its
limit gets an instance of the other if that lowers the higher of both loads by
`gain`, and has for `hold_s`; then nothing is advised for `rest_s`, as what an
instance holds has to go first.

So the ratio settles where both pools are equally loaded (FAST'25 section 5.5
sweeps it by hand).
"""

from dataclasses import dataclass
import math

from mooncake_jax.conductor.advice import SetRole


@dataclass(frozen=True)
class RoleRules:
  """When an instance changes its role.

  Attributes:
    gain: least share by which the higher load must fall.
    hold_s: how long that must have been so.
    rest_s: between two changes.
    average_s: time constant of the loads.
    min_instances: of each role, always.
  """

  gain: float = 0.15
  hold_s: float = 30.0
  rest_s: float = 120.0
  average_s: float = 60.0
  min_instances: int = 1

  def __post_init__(self):
    if not 0 < self.gain < 1:
      raise ValueError(f'RoleRules.gain={self.gain} must be in (0, 1)')
    for name in ('hold_s', 'rest_s', 'average_s'):
      if not getattr(self, name) > 0:
        raise ValueError(f'RoleRules.{name}={getattr(self, name)} must be > 0')
    if self.min_instances < 1:
      raise ValueError(
        f'RoleRules.min_instances={self.min_instances} must be >= 1'
      )


class Roles:
  """Loads of both pools over time, and since when a change would pay."""

  def __init__(self, rules: RoleRules):
    self._rules = rules
    self._prefill_s = 0.0
    self._decode_s = 0.0
    self._updated_s = 0.0
    self._wanted = ''
    self._wanted_since_s = 0.0
    self._changed_s = 0.0  # loads are not known at the start

  def placed(self, prefill_s: float, decode_s: float, now_s: float) -> None:
    """Seconds of one prefill instance and of one decode instance were given."""
    kept = self._forget(now_s)
    self._prefill_s = self._prefill_s * kept + prefill_s
    self._decode_s = self._decode_s * kept + decode_s

  def loads(
    self, num_prefill: int, num_decode: int, now_s: float
  ) -> tuple[float, float]:
    """Load of the prefill pool and of the decode pool, 1 is full."""
    age_s = max(now_s - self._updated_s, 0.0)
    kept = math.exp(-age_s / self._rules.average_s) / self._rules.average_s
    return (
      self._prefill_s * kept / num_prefill,
      self._decode_s * kept / num_decode,
    )

  def advise(
    self,
    prefill_idle_first: list[str],
    decode_idle_first: list[str],
    now_s: float,
  ) -> SetRole | None:
    """A change that has paid for long enough; it is taken to be made.

    Args:
      prefill_idle_first, decode_idle_first: by role, the least busy first.
    """
    role = self._better(len(prefill_idle_first), len(decode_idle_first), now_s)
    if role != self._wanted:
      self._wanted, self._wanted_since_s = role, now_s
    rested = now_s - self._changed_s >= self._rules.rest_s
    held = now_s - self._wanted_since_s >= self._rules.hold_s
    if not role or not rested or not held:
      return None
    self._changed_s, self._wanted = now_s, ''
    names = decode_idle_first if role == 'prefill' else prefill_idle_first
    return SetRole(names[0], 'prefill' if role == 'prefill' else 'decode')

  def _better(self, num_prefill: int, num_decode: int, now_s: float) -> str:
    """The role that should get one more instance, or ''."""
    least = self._rules.min_instances
    if min(num_prefill, num_decode) < 1:
      return ''
    prefill, decode = self.loads(num_prefill, num_decode, now_s)
    for role, p, d in (
      ('prefill', num_prefill + 1, num_decode - 1),
      ('decode', num_prefill - 1, num_decode + 1),
    ):
      if min(p, d) < least:
        continue
      after = max(prefill * num_prefill / p, decode * num_decode / d)
      if after < (1 - self._rules.gain) * max(prefill, decode):
        return role
    return ''

  def _forget(self, now_s: float) -> float:
    age_s = max(now_s - self._updated_s, 0.0)
    self._updated_s = max(now_s, self._updated_s)
    return math.exp(-age_s / self._rules.average_s)

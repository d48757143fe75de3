# SPDX-License-Identifier: Apache-2.0
"""What links carried in a run, and how much of them that took."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from mooncake_jax.backend import LinkUse


class LinkFigures(NamedTuple):
  """By kind of link.

  Attributes:
    link_bytes: that all links of a kind carried.
    link_utilisation: seconds used / duration: `mean` over the instances whose
      link carried anything, and `max`, of the busiest.
  """

  link_bytes: dict[str, int]
  link_utilisation: dict[str, dict[str, float]]


def link_figures(
  uses: Mapping[tuple[str, str], LinkUse], duration_s: float
) -> LinkFigures:
  """Figures of links that carried anything; kinds in alphabetical order.

  Args:
    uses: by kind and instance, see `Backend.link_uses`.
    duration_s: of the run.
  """
  kinds: dict[str, list[LinkUse]] = defaultdict(list)
  for (kind, _), use in sorted(uses.items()):
    if use.num_bytes:
      kinds[kind].append(use)
  shares = {
    kind: [use.used_s / duration_s if duration_s else 0.0 for use in found]
    for kind, found in kinds.items()
  }
  return LinkFigures(
    {k: round(sum(u.num_bytes for u in found)) for k, found in kinds.items()},
    {k: {'mean': sum(s) / len(s), 'max': max(s)} for k, s in shares.items()},
  )

# SPDX-License-Identifier: Apache-2.0
"""Hit rates of the published traces, simulated apart from this library.

(by token, mean of requests) at capacities in 512-token blocks; every started
block keyed, one pool, no lease. The first capacity is more than there are.
"""

CAPACITIES = (1_000_000, 100_000, 50_000, 30_000, 10_000, 5_860, 1_000, 200)

TABLE: dict[tuple[str, str], tuple[tuple[float, float], ...]] = {
  ('conversation', 'lru'): (
    (0.374, 0.409),
    (0.371, 0.408),
    (0.362, 0.403),
    (0.332, 0.385),
    (0.216, 0.297),
    (0.139, 0.240),
    (0.045, 0.162),
    (0.043, 0.159),
  ),
  ('conversation', 'lfu'): (
    (0.374, 0.409),
    (0.370, 0.408),
    (0.351, 0.394),
    (0.281, 0.340),
    (0.134, 0.223),
    (0.098, 0.198),
    (0.049, 0.164),
    (0.046, 0.161),
  ),
  ('synthetic', 'lru'): (
    (0.651, 0.432),
    (0.651, 0.432),
    (0.651, 0.432),
    (0.636, 0.422),
    (0.432, 0.291),
    (0.315, 0.218),
    (0.086, 0.063),
    (0.018, 0.013),
  ),
  ('synthetic', 'lfu'): (
    (0.651, 0.432),
    (0.651, 0.432),
    (0.651, 0.432),
    (0.637, 0.423),
    (0.360, 0.247),
    (0.245, 0.170),
    (0.039, 0.040),
    (0.005, 0.006),
  ),
}


def published(trace: str, policy: str, capacity: int) -> tuple[float, float]:
  return TABLE[trace, policy][CAPACITIES.index(capacity)]

# SPDX-License-Identifier: Apache-2.0
"""All benchmarks, by name: a function (quick) -> rows each."""

from collections.abc import Callable

from scripts.benches.decode import decode
from scripts.benches.hits import hits
from scripts.benches.master import master
from scripts.benches.prefill import prefill
from scripts.benches.rows import Row
from scripts.benches.ssd import ssd
from scripts.benches.steady import steady
from scripts.benches.store import store

BENCHES: dict[str, Callable[[bool], list[Row]]] = {
  'prefill': prefill,
  'decode': decode,
  'store': lambda quick: [*store(quick), *steady(quick), *ssd(quick)],
  'master': master,
  'hits': hits,
}

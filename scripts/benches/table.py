# SPDX-License-Identifier: Apache-2.0
"""All benchmarks, by name: a function (quick) -> rows each."""

from collections.abc import Callable

from scripts.benches.chaos import chaos
from scripts.benches.clients import clients
from scripts.benches.cluster import cluster
from scripts.benches.colocated import colocated
from scripts.benches.conductor import conductor
from scripts.benches.cpp import cpp
from scripts.benches.decode import decode
from scripts.benches.fleet import fleet
from scripts.benches.gateway import gateway
from scripts.benches.hits import hits
from scripts.benches.index import index
from scripts.benches.master import master
from scripts.benches.mixed import mixed
from scripts.benches.mooncake import mooncake as mooncake_rows
from scripts.benches.overlap import overlap
from scripts.benches.policies import policies
from scripts.benches.prefill import prefill
from scripts.benches.quantized import quantized
from scripts.benches.rows import Row
from scripts.benches.shared import shared
from scripts.benches.sim import sim
from scripts.benches.soak import soak
from scripts.benches.ssd import ssd
from scripts.benches.steady import steady
from scripts.benches.store import store
from scripts.benches.streaming import streaming
from scripts.benches.sweeps import sweeps
from scripts.benches.transfer import transfer

BENCHES: dict[str, Callable[[bool], list[Row]]] = {
  'prefill': prefill,
  'cpp': cpp,
  'colocated': colocated,
  'chaos': chaos,
  'cluster': cluster,
  'decode': decode,
  'fleet': lambda quick: [*fleet(quick)],
  'mixed': mixed,
  'soak': soak,
  'quantized': quantized,
  'store': lambda quick: [*steady(quick), *store(quick)],
  'transfer': lambda quick: [*transfer(quick), *ssd(quick)],
  'mooncake': lambda quick: [*mooncake_rows(quick), *shared(quick)],
  'overlap': overlap,
  'streaming': streaming,
  'master': master,
  'hits': hits,
  'index': index,
  'conductor': conductor,
  'clients': clients,
  'sim': lambda quick: [*sim(quick)],
  'gateway': gateway,
  'policies': lambda quick: [*policies(quick)],
  'sweep': lambda quick: [*sweeps(quick)],
}

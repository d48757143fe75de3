# SPDX-License-Identifier: Apache-2.0
"""A driver as a program: serves on instances that outlive it, or took over.

python ray_driver.py ADDRESS first|second

It prints JSON lines. The first one hangs in the midst of a second round, so
that it can be killed there; the second one ends the instances.
"""

from dataclasses import replace
import json
import sys
import time
from typing import Any

from engine_pieces import MODEL
from lifecycle import COSTS
from lifecycle import make_conductor
from lifecycle import shared_prefix_requests
from mooncake_jax.cluster import Cluster
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.events import WorkDone
from mooncake_jax.serve import serve
from mooncake_jax.transfer.arrivals import EARLY_S
from ray_pieces import leftovers
from ray_pieces import ray_cluster
from ray_pieces import SMALL
from ray_pieces import tokens_of


def tell(**facts: object) -> None:
  print(json.dumps(facts), flush=True)


def hang(event: object) -> None:
  if isinstance(event, WorkDone):
    tell(event='hangs')
    time.sleep(600)


def settled(backend: Any) -> dict[str, Any]:
  """What is held once parts that came early for nobody were let go of."""
  until_s = time.monotonic() + 1.5 * EARLY_S
  while True:
    held = backend.holdings()
    if time.monotonic() > until_s or not any(
      each.num_works or each.buffer_bytes for each in held.values()
    ):
      return held
    time.sleep(0.2)


def main(address: str, which: str) -> None:
  requests = shared_prefix_requests(4, prefix=64, output=5)
  spec = RaySpec(address=address, name='tests')
  with ray_cluster(SMALL, spec) as backend:
    held = settled(backend)
    tell(
      event='began',
      processes=backend.crew.process_ids,
      works={name: each.num_works for name, each in held.items()},
      buffers={name: each.buffer_bytes for name, each in held.items()},
    )
    cluster = Cluster(SMALL, MODEL, backend, costs=COSTS)
    inventory = [*cluster.inventory('prefill0')]
    records, _ = serve(requests, make_conductor(SMALL), cluster)
    cluster.check()
    tell(
      event='served',
      blocks=len(inventory),
      tokens=tokens_of(records),
      reused=[r.reused_tokens for r in records],
      left=leftovers(cluster),
    )
    if which == 'first':
      now_s = backend.now_s()
      more = shared_prefix_requests(8, prefix=64, suffix=40, output=20, seed=1)
      more = [replace(r, arrival_s=now_s) for r in more]
      serve(more, make_conductor(SMALL), cluster, on_event=hang)
    backend.crew.close(ends_named=True)


if __name__ == '__main__':
  main(*sys.argv[1:])

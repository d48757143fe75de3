# SPDX-License-Identifier: Apache-2.0
"""Blocks to and from pinned host memory, against memcpy.

Put and get are transfers of the engine, as serving starts them: pages to
replica and replica to pages, in parts by layer range, timed from the call to
the completion.
"""

import jax

from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.model import params
from scripts import measure
from scripts.benches import limits
from scripts.benches.model import CONFIG
from scripts.benches.rows import Row
from scripts.device import instance_specs

COPIED_BYTES = 256 << 20
SPEC = ClusterSpec(
  prefill_instances=2,
  decode_instances=1,
  block_size_tokens=128,
  page_tokens=64,
  layers_per_transfer=10,
  max_tokens=2048,
  prefill_pool_tokens=4096,
  decode_pool_tokens=4096,
  host_bytes=1 << 30,
)
NAMES = {
  'offload': 'put',
  'onload': 'get',
  'copy': 'copy_between_segments',
  'handoff': 'handoff_to_decode',
}


def store(quick: bool) -> list[Row]:
  """Bytes a second of each link for one block and for many."""
  layout = SPEC.layout(CONFIG)
  made = params.init_params(CONFIG, jax.random.key(0))
  with DeviceBackend(
    CONFIG, layout, instance_specs(SPEC, CONFIG), made
  ) as backend:
    for _ in measure.link_samples(backend, SPEC, layout):
      pass  # compiles the copies
    samples = list(measure.link_samples(backend, SPEC, layout))
  peak = limits.copy_bytes_per_s(COPIED_BYTES, 5 if quick else 20)
  largest = max(sample.num_bytes for _, sample in samples)
  rows = [Row('store.memcpy_bytes_per_s', peak, 'B/s', 'numpy.copyto, 256 MiB')]
  for link, (num_bytes, seconds) in samples:
    name = f'store.{NAMES[link]}.{num_bytes / 1e6:.0f}MB'
    speed = num_bytes / seconds
    asked = num_bytes == largest and link in ('offload', 'onload')
    rows += [
      Row(f'{name}.bytes_per_s', speed, 'B/s'),
      Row(
        f'{name}.memcpy_share',
        speed / peak,
        'ratio',
        'store.memcpy_bytes_per_s of this run',
        target=0.1 if asked else None,
      ),
    ]
  return rows

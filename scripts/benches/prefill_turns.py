# SPDX-License-Identifier: Apache-2.0
"""Prefill by one instance of the engine, and matrix products, in turns.

python -m scripts.benches.prefill_turns '{"threads": 1, "config": {...}, ...}'

Runs in a process of its own, as the number of threads is one of a process.
"""

from collections.abc import Sequence
import json
import sys
import threading
from typing import Any

from scripts.peers.turns import Child

SAMPLE_S = 0.02


def main(
  threads: int, config: dict[str, Any], chunks: Sequence[int], max_tokens: int
) -> None:
  child = Child(threads)
  import jax

  from mooncake_jax.model_config import ModelConfig
  from scripts.benches import limits
  from scripts.benches.prefill_instance import prefill_backend
  from scripts.benches.prefill_instance import prefill_chunks
  from scripts.device import start_jax

  start_jax(num_devices=1)
  shape = ModelConfig.from_hf(config)
  with prefill_backend(shape, max_tokens, chunks) as backend:

    def prefill(start: int, stop: int, chunk: int) -> None:
      prefill_chunks(backend, start, stop, chunk)

    def peak(stop: int, chunk: int) -> dict[str, int]:
      with LiveBytes() as live:
        prefill_chunks(backend, 0, stop, chunk)
      return {'peak_bytes': live.peak}

    works = {'prefill': prefill, 'peak': peak, 'gemm': limits.gemm}
    child.answer(works, f'mooncake_jax, jax {jax.__version__}')


class LiveBytes:
  """The most bytes that live JAX arrays had together, sampled by a thread."""

  def __init__(self):
    self.peak = 0
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch)

  def __enter__(self) -> 'LiveBytes':
    self._thread.start()
    return self

  def __exit__(self, *_) -> None:
    self._stop.set()
    self._thread.join()
    self._look()

  def _watch(self) -> None:
    while not self._stop.wait(SAMPLE_S):
      self._look()

  def _look(self) -> None:
    import jax

    # What one buffer holds counts once, however many arrays name it.
    sizes = {
      shard.data.unsafe_buffer_pointer(): shard.data.nbytes
      for array in jax.live_arrays()
      if not array.is_deleted()
      for shard in array.addressable_shards
    }
    self.peak = max(self.peak, sum(sizes.values()))


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))

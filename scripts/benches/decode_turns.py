# SPDX-License-Identifier: Apache-2.0
"""Decode steps, the reads they need, and the host's share of them, in turns.

python -m scripts.benches.decode_turns '{"threads": 1, "batches": [1], ...}'

Runs in a process of its own, as the number of threads is one of a process.
"""

from collections.abc import Sequence
import json
import sys

from scripts.peers.turns import Child


def main(threads: int, cases: Sequence[tuple[int, int]]) -> None:
  child = Child(threads)
  import jax

  from scripts.benches import limits
  from scripts.benches.model import Model
  from scripts.benches.model import PAGE_TOKENS
  from scripts.device import start_jax

  start_jax(num_devices=1)
  longest = max(context for _, context in cases) + 64
  tokens = max(batch * (context + 64) for batch, context in cases)
  num_pages = 1 + -(-tokens // PAGE_TOKENS)
  model = Model(longest, max(b for b, _ in cases), num_pages=num_pages)

  def decode(batch: int, context: int, steps: int) -> None:
    state = model.batch([context - 1] * batch)
    for _ in range(steps):
      state = model.decode(state)
    jax.block_until_ready(state.tokens_B)

  works = {'decode': decode, 'read': limits.read}
  child.answer(works, f'mooncake_jax, jax {jax.__version__}')


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))

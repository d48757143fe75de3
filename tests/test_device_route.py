# SPDX-License-Identifier: Apache-2.0
"""KVCache goes the way of GPUs and TPUs: compiled copies and `device_put`.

CPU devices have a shorter way; here it is turned off.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from engine_pieces import Desk
from engine_pieces import LAYOUT
from engine_pieces import plain_tokens
from engine_pieces import random_tokens
from engine_pieces import tiny_backend
from engine_pieces import tiny_spec
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.transfer import cpu_copies
from mooncake_jax.transfer import links

TOKENS = 37
PAGES = tuple(range(1, 12))
USED = LAYOUT.pages_for(TOKENS)


def refuse(*args):
  raise AssertionError("a CPU's own way was taken")


@pytest.fixture(scope='module')
def desk() -> Iterator[Desk]:
  """Instances on 1, 2 and 4 devices: KV heads whole, split, and copied."""
  specs = tiny_spec('a'), tiny_spec('b', num_devices=2)
  specs += (tiny_spec('d', num_devices=4),)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cpu_copies, 'IS_TAKEN', False)
    for module, name in (
      (cpu_copies, 'copy_out'),
      (cpu_copies, 'copy_in'),
      (links, 'copied'),
    ):
      patch.setattr(module, name, refuse)
    with tiny_backend(*specs) as backend:
      yield Desk(backend)


@pytest.mark.parametrize(('prefill', 'decode'), ['ab', 'bd', 'da', 'bb'])
def test_what_devices_hand_over_gives_the_tokens_of_one_instance(
  desk, prefill, decode
):
  tokens = random_tokens(TOKENS, seed=2)
  expected = plain_tokens(desk, tokens, 4)
  here = tuple(range(31, 42))
  first = desk.prefill(prefill, tokens, PAGES)
  src, dst = PAGES[:USED], here[:USED]
  desk.move(DevicePages(prefill, src), DevicePages(decode, dst))
  assert [first, *desk.decode(decode, first, TOKENS, here, 4)] == expected


@pytest.mark.parametrize(('putter', 'getter'), ['ad', 'ba', 'db'])
def test_blocks_come_back_from_pinned_host_memory_as_they_went(
  desk, putter, getter
):
  tokens = random_tokens(TOKENS, seed=3)
  expected = plain_tokens(desk, tokens, 4)
  desk.prefill(putter, tokens, PAGES)
  here = tuple(range(41, 52))
  made = []
  for i in range(TOKENS // LAYOUT.block_size_tokens):
    put, copied, back = (
      Replica(name, 3 * i + j)
      for j, name in enumerate((putter, getter, getter))
    )
    made += [put, copied, back]
    at = LAYOUT.block_pages(here, i)
    desk.move(DevicePages(putter, LAYOUT.block_pages(PAGES, i)), put)
    desk.move(put, copied)
    desk.move(copied, DevicePages(getter, at))
    desk.move(DevicePages(getter, at), back)
    block = desk.bytes_of(put)
    assert np.abs(block).min() > 0
    np.testing.assert_array_equal(block, desk.bytes_of(copied))
    np.testing.assert_array_equal(block, desk.bytes_of(back))
  first = desk.prefill(getter, tokens, here, start=32)
  assert [first, *desk.decode(getter, first, TOKENS, here, 4)] == expected
  desk.backend.drop(tuple(made))

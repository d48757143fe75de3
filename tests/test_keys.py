# SPDX-License-Identifier: Apache-2.0
"""Block keys against the published vectors and the meaning of a chain."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from mooncake_jax.blocks.keys import low64
from mooncake_jax.blocks.keys import prefix_keys

TOKENS = np.arange(1, 9)


@pytest.mark.parametrize(
  'extra,expected',
  [
    ({}, (2164874634404590027, 17270480062156288726)),
    ({'lora': 'adapter-A'}, (2672389869369184802, 2930887600816385705)),
    ({'salt': 'tenant-salt'}, (13142020951183496025, 4203791783824221722)),
    (
      {'lora': 'adapter-A', 'salt': 'tenant-salt'},
      (17539136676481425472, 3818960430654273638),
    ),
  ],
)
def test_keys_equal_the_published_vectors(extra, expected):
  keys = prefix_keys(TOKENS, 4, identity='0', **extra)
  assert tuple(map(low64, keys)) == expected


def test_only_complete_blocks_have_keys():
  assert len(prefix_keys(TOKENS[:7], 4)) == 1
  assert prefix_keys(TOKENS[:3], 4) == ()


@hypothesis.given(
  st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=24),
  st.integers(0, 23),
  st.integers(0, 2**32 - 1),
)
def test_a_changed_token_changes_its_block_and_all_after(tokens, where, new):
  where %= len(tokens)
  changed = list(tokens)
  changed[where] = new
  old = prefix_keys(np.array(tokens), 3)
  fresh = prefix_keys(np.array(changed), 3)
  for i, (a, b) in enumerate(zip(old, fresh)):
    assert (a == b) == (i < where // 3 or new == tokens[where])


@hypothesis.given(st.lists(st.integers(0, 70000), min_size=1, max_size=30))
def test_the_integer_encoding_is_that_of_cbor(tokens):
  from mooncake_jax.blocks.keys import _encode_uints
  from mooncake_jax.blocks.keys import _head

  body, ends = _encode_uints(np.array(tokens))
  parts = [_head(0, token) for token in tokens]
  assert body == b''.join(parts)
  assert list(ends) == list(np.cumsum([len(part) for part in parts]))


def test_a_token_outside_32_bits_is_named():
  with pytest.raises(ValueError, match='token id -1'):
    prefix_keys(np.array([1, -1, 2, 3]), 2)

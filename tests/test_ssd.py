# SPDX-License-Identifier: Apache-2.0
"""An SSD segment alone: what it gives back is what was put, or an error."""

from pathlib import Path
import time

import ml_dtypes
import numpy as np
import pytest
import tensorstore

from mooncake_jax.backend import Replica
from mooncake_jax.transfer import entries
from mooncake_jax.transfer.checksum import ChecksumError
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.entry import HEADER_BYTES
from mooncake_jax.transfer.segment import Part
from mooncake_jax.transfer.ssd import SsdSegment

BLOCK = BlockFormat(3, 8, 2, 8, np.dtype('float32'))
BLOCK_BYTES = BLOCK.num_bytes(0, 3)
RANGES = ((0, 2), (2, 3))


def key(i: int) -> bytes:
  return i.to_bytes(32, 'big')


def replica(i: int, key_of: int | None = None) -> Replica:
  return Replica('a/ssd', i, key(i if key_of is None else key_of))


def block(seed: int, block: BlockFormat = BLOCK) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.random(block.shape(0, 3)).astype(block.dtype)


def put(segment: SsdSegment, to: Replica, whole: np.ndarray, split=1) -> None:
  for start, stop in RANGES:
    slices = tuple(np.split(whole[start:stop], split, axis=3))
    segment.store(to, Part(start, stop, slices))
    segment.keep(to, (start, stop))


def get(segment: SsdSegment, src: Replica) -> np.ndarray:
  parts = [segment.read(src, r) for r in segment.ranges(src, 0, 3)]
  return np.concatenate([np.concatenate(p.slices, 3) for p in parts])


def open_at(url: str, capacity_bytes: int = 4 * BLOCK_BYTES, **kwargs):
  kwargs = {'block': BLOCK, **kwargs}
  return SsdSegment('a/ssd', url, capacity_bytes, **kwargs)


def file_of(folder: Path, i: int, layers: str = '0-2') -> Path:
  return folder / key(i).hex() / layers


@pytest.fixture(params=['plain', 'tensorstore', 'memory'])
def segment(request, tmp_path):
  """The same segment over each kind of store."""
  if request.param == 'memory':
    made = open_at('memory://blocks')
  else:
    plain = request.param == 'plain'
    made = open_at(tmp_path.as_uri(), plain_files=plain)
  yield made
  made.close()


@pytest.mark.parametrize('split', [1, 2])
def test_what_is_read_is_what_was_put(segment, split):
  put(segment, replica(1), block(1), split)
  np.testing.assert_array_equal(get(segment, replica(1)), block(1))
  assert segment.used_bytes == BLOCK_BYTES


def test_a_part_is_unreadable_until_it_is_kept(segment):
  segment.store(replica(1), Part(0, 2, (block(1)[:2],)))
  with pytest.raises(LookupError, match='layer 0 is not here'):
    segment.ranges(replica(1), 0, 2)
  segment.forget(replica(1), (0, 2))
  assert segment.used_bytes == 0
  put(segment, replica(1), block(2))
  np.testing.assert_array_equal(get(segment, replica(1)), block(2))


def test_a_drop_never_takes_a_later_put_of_its_key_along(segment):
  for i in range(20):
    old, new = replica(2 * i, key_of=1), replica(2 * i + 1, key_of=1)
    put(segment, old, block(i))
    segment.drop([old])
    put(segment, new, block(i + 100))
    segment.sweep()
    segment.drop([old])  # again, and late
    segment.sweep()
    np.testing.assert_array_equal(get(segment, new), block(i + 100))
    with pytest.raises(LookupError):
      get(segment, old)
    segment.drop([new])
  assert segment.used_bytes == 0


def test_capacity_is_a_limit_and_drops_make_room_at_once(segment):
  for i in range(4):
    put(segment, replica(i), block(i))
  with pytest.raises(ValueError, match=f'capacity_bytes={4 * BLOCK_BYTES}'):
    put(segment, replica(9), block(9))
  segment.drop([replica(2)])
  put(segment, replica(9), block(9))
  np.testing.assert_array_equal(get(segment, replica(9)), block(9))


def test_a_duplicate_put_is_refused_and_changes_nothing(segment):
  put(segment, replica(1), block(1))
  with pytest.raises(ValueError, match='there already'):
    put(segment, replica(1), block(2))
  with pytest.raises(ValueError, match='there already'):
    put(segment, replica(5, key_of=1), block(2))
  np.testing.assert_array_equal(get(segment, replica(1)), block(1))
  assert segment.used_bytes == BLOCK_BYTES


@pytest.mark.parametrize(
  'bad', [block(0)[:, :, :4], block(0).astype(np.float16), block(0)[:1]]
)
def test_a_part_of_another_size_or_dtype_is_refused(segment, bad):
  with pytest.raises(ValueError, match='no part of a block'):
    segment.store(replica(1), Part(0, 2, (bad[:2],)))
  with pytest.raises(ValueError, match='has no key'):
    segment.store(Replica('a/ssd', 1), Part(0, 2, (block(0)[:2],)))
  assert segment.used_bytes == 0


def test_bfloat16_keeps_its_bits(tmp_path):
  half = BlockFormat(3, 8, 2, 8, np.dtype(ml_dtypes.bfloat16))
  segment = open_at(tmp_path.as_uri(), block=half)
  put(segment, replica(1), block(1, half))
  found = get(segment, replica(1))
  assert found.dtype == half.dtype
  np.testing.assert_array_equal(found, block(1, half))


def truncate(path: Path) -> None:
  path.write_bytes(path.read_bytes()[:-1])


def cut_header(path: Path) -> None:
  path.write_bytes(path.read_bytes()[:50])


def empty(path: Path) -> None:
  path.write_bytes(b'')


def lengthen(path: Path) -> None:
  path.write_bytes(path.read_bytes() + b'\0')


def flip(at: int):
  def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)

  change.__name__ = f'flip_{at}'
  return change


DAMAGE = [truncate, cut_header, empty, lengthen]
DAMAGE += [flip(i) for i in (0, 8, 10, 20, 36, 64, 100, HEADER_BYTES, 900, -1)]


@pytest.mark.parametrize('damage', DAMAGE, ids=lambda d: d.__name__)
def test_a_damaged_entry_is_an_error_and_gone(tmp_path, damage):
  segment = open_at(tmp_path.as_uri())
  put(segment, replica(1), block(1))
  put(segment, replica(2), block(2))
  damage(file_of(tmp_path, 1))
  with pytest.raises(ChecksumError, match='entry'):
    get(segment, replica(1))
  with pytest.raises(LookupError, match='layer 0 is not here'):
    get(segment, replica(1))
  segment.sweep()
  assert not file_of(tmp_path, 1).exists()
  np.testing.assert_array_equal(get(segment, replica(2)), block(2))


def test_an_entry_under_the_name_of_another_is_an_error(tmp_path):
  segment = open_at(tmp_path.as_uri())
  put(segment, replica(1), block(1))
  put(segment, replica(2), block(2))
  file_of(tmp_path, 1).rename(file_of(tmp_path, 2))
  with pytest.raises(ChecksumError):
    get(segment, replica(2))
  with pytest.raises(LookupError, match='is not here'):
    get(segment, replica(1))


@pytest.mark.parametrize('plain', [True, False])
def test_whole_blocks_are_adopted_and_the_rest_is_removed(tmp_path, plain):
  url = tmp_path.as_uri()
  before = open_at(url)
  for i in range(4):
    put(before, replica(i), block(i), split=2)
  before.close()
  truncate(file_of(tmp_path, 0))
  file_of(tmp_path, 1, '2-3').unlink()
  torn = file_of(tmp_path, 2, '0-2.torn')
  torn.write_bytes(b'half')
  foreign = tmp_path / 'notes' / 'mine'
  foreign.parent.mkdir()
  foreign.write_text('not a block')

  segment = open_at(url, plain_files=plain)
  whole = sorted(segment.adopt())
  assert whole == [(key(i), BLOCK_BYTES) for i in (2, 3)]
  assert segment.used_bytes == 2 * BLOCK_BYTES
  for i in (2, 3):
    np.testing.assert_array_equal(get(segment, replica(i + 50, i)), block(i))
  assert not torn.exists() and foreign.exists()
  assert not file_of(tmp_path, 0).exists()
  assert not file_of(tmp_path, 1).exists()
  put(segment, replica(60, 1), block(60))
  segment.drop([replica(52, 2)])
  segment.close()
  again = open_at(url)
  assert sorted(k for k, _ in again.adopt()) == [key(1), key(3)]


def test_blocks_of_another_model_or_beyond_the_capacity_are_removed(tmp_path):
  url = tmp_path.as_uri()
  before = open_at(url)
  for i in range(4):
    put(before, replica(i), block(i))
  before.close()
  small = open_at(url, 2 * BLOCK_BYTES)
  assert len(small.adopt()) == 2 and small.used_bytes == 2 * BLOCK_BYTES
  small.close()
  half = BlockFormat(3, 8, 2, 8, np.dtype(ml_dtypes.bfloat16))
  other = open_at(url, block=half)
  assert other.adopt() == []
  other.close()
  assert [path.name for path in tmp_path.iterdir()] == ['.lock']


def test_a_folder_that_cannot_be_used_is_named_in_one_line(tmp_path):
  held = open_at(tmp_path.as_uri())
  file = tmp_path / 'file'
  file.write_text('')
  for url, why in (
    ((tmp_path / 'missing').as_uri(), 'no directory'),
    (file.as_uri(), 'no directory'),
    ('file:///proc/self', 'cannot write'),
    (tmp_path.as_uri(), 'in use'),
    ('nosuch://place', 'cannot be opened'),
  ):
    with pytest.raises(ValueError, match=why) as caught:
      open_at(url)
    message = str(caught.value)
    assert '\n' not in message and url.split('//')[1] in message
  with pytest.raises(ValueError, match='capacity_bytes'):
    open_at(url, -1)
  held.close()
  open_at(tmp_path.as_uri()).close()


class Silent:
  """What tensorstore gives of a bucket that never answers."""

  def __init__(self):
    self._promises = []  # a future whose promise is gone has failed

  def __getattr__(self, name):
    del name
    return self._ask

  def _ask(self, *args, **kwargs):
    promise, future = tensorstore.Promise.new()
    self._promises.append(promise)
    return future


def test_a_store_that_does_not_answer_is_waited_for_so_long_only(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(entries, 'STORE_TIMEOUT_S', 0.1)
  url = f'file://{tmp_path}'
  segment = SsdSegment('a/ssd', url, 1 << 20, BLOCK, plain_files=False)
  for i in range(20):
    put(segment, replica(i), block(i))
  began_s = time.monotonic()
  monkeypatch.setattr(segment._entries, '_store', Silent())
  with pytest.raises(OSError, match='no answer within'):
    segment.read(replica(0), RANGES[0])
  with pytest.raises(OSError, match='no answer within'):
    put(segment, replica(20), block(20))
  segment.drop([replica(i) for i in range(20)])
  segment.close()  # 40 entries would be 4 s, were each waited for
  assert time.monotonic() - began_s < 2

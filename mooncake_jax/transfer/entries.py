# SPDX-License-Identifier: Apache-2.0
"""Named byte strings that outlive the process: plain files, or a tensorstore.

`file://` URLs are served by plain files: bytes go from the arrays to the
page cache and back without a copy between, which a key-value store's API
doesn't allow. All other URLs, and `file://` if asked, go through tensorstore;
both lay files out alike. Any one thread at a time may call.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import fcntl
import os
from pathlib import Path
from typing import Any
from typing import Protocol
from urllib.parse import unquote
from urllib.parse import urlsplit

import numpy as np
import tensorstore

from mooncake_jax.transfer.checksum import raw_bytes

STORE_TIMEOUT_S = 60.0  # of a call; close() waits for those under way
ALIGN_BYTES = 64  # a CPU device uses memory aligned so in place


class Entries(Protocol):
  """A store of entries; `name` has one '/' in it."""

  def write(self, name: str, pieces: Sequence[memoryview]) -> None:
    """Writes an entry of byte arrays; it is there whole or not at all."""
    ...

  def read(self, name: str) -> np.ndarray:
    """Returns an entry, uint8; LookupError if there is none."""
    ...

  def head(self, name: str, num_bytes: int) -> bytes:
    """Returns its first bytes, fewer where it has no more."""
    ...

  def has(self, name: str, num_bytes: int) -> bool:
    """Whether the entry has at least so many bytes."""
    ...

  def delete(self, name: str) -> None:
    """Removes an entry; ignores one that is not there."""
    ...

  def names(self) -> list[str]:
    """All entries, leftovers of torn writes included."""
    ...

  def close(self) -> None: ...


def open_entries(
  url: str, file_io_sync: bool = False, plain_files: bool = True
) -> Entries:
  """Opens a store.

  Args:
    url: 'file:///folder' (which must be there), or what tensorstore knows.
    file_io_sync: whether a write waits for the disk.
    plain_files: False serves `file://` by tensorstore as well.

  Raises:
    ValueError: it can't be opened; one line that names the URL.
  """
  parts = urlsplit(url)
  if parts.scheme == 'file':
    folder = Path(unquote(parts.path))
    if not folder.is_dir():
      raise ValueError(f'{url=}: there is no directory {str(folder)!r}')
    files = FileEntries(folder, file_io_sync)
    if plain_files:
      return files
    files.close()
  try:
    return StoreEntries(url, file_io_sync)
  except Exception as error:
    why = ' '.join(str(error).split())
    raise ValueError(f'{url=} cannot be opened: {why}') from None


class FileEntries:
  """A folder of files, held by one process at a time."""

  def __init__(self, folder: Path, file_io_sync: bool):
    """Takes the folder; raises ValueError if that is not possible."""
    self._folder = folder
    self._sync = file_io_sync
    try:
      self._lock = os.open(folder / '.lock', os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
      why = error.strerror
      raise ValueError(f'cannot write in {str(folder)!r}: {why}') from None
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      os.close(self._lock)
      raise ValueError(f'{str(folder)!r} is in use by another') from None

  def write(self, name: str, pieces: Sequence[memoryview]) -> None:
    """See `Entries`."""
    path = self._folder / name
    path.parent.mkdir(exist_ok=True)
    torn = path.with_name(path.name + '.torn')
    file = os.open(torn, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    try:
      try:
        for piece in pieces:
          _write_all(file, piece)
        if self._sync:
          os.fsync(file)
      finally:
        os.close(file)
      os.replace(torn, path)
    except OSError:
      torn.unlink(missing_ok=True)
      raise

  def read(self, name: str) -> np.ndarray:
    """See `Entries`; its memory is aligned."""
    try:
      file = os.open(self._folder / name, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
      raise LookupError(f'entry {name!r} is not here') from None
    try:
      entry = aligned(os.fstat(file).st_size)
      at = 0
      view = raw_bytes(entry)
      while at < len(entry) and (got := os.readv(file, [view[at:]])):
        at += got
      return entry[:at]
    finally:
      os.close(file)

  def head(self, name: str, num_bytes: int) -> bytes:
    """See `Entries`."""
    with open(self._folder / name, 'rb', buffering=0) as file:
      return file.read(num_bytes)

  def has(self, name: str, num_bytes: int) -> bool:
    """Whether it has just so many."""
    return os.stat(self._folder / name).st_size == num_bytes

  def delete(self, name: str) -> None:
    """See `Entries`; the block's folder goes with its last part."""
    path = self._folder / name
    path.unlink(missing_ok=True)
    try:
      path.parent.rmdir()
    except OSError:
      pass  # other parts are there

  def names(self) -> list[str]:
    """See `Entries`."""
    return [*self._names()]

  def _names(self) -> Iterator[str]:
    for folder in os.scandir(self._folder):
      if folder.is_dir():
        yield from (f'{folder.name}/{f.name}' for f in os.scandir(folder))

  def close(self) -> None:
    os.close(self._lock)


class StoreEntries:
  """A tensorstore key-value store; TimeoutError where it does not answer."""

  def __init__(self, url: str, file_io_sync: bool):
    """Opens it; whatever it raises is tensorstore's."""
    context = tensorstore.Context({'file_io_sync': file_io_sync})
    url = url if url.endswith('/') else f'{url}/'
    self._store = _done(tensorstore.KvStore.open(url, context=context))
    _done(self._store.write('.lock', b''))

  def write(self, name: str, pieces: Sequence[memoryview]) -> None:
    """See `Entries`."""
    _done(self._store.write(name, b''.join(pieces)))

  def read(self, name: str) -> np.ndarray:
    """See `Entries`."""
    found = _done(self._store.read(name))
    if found.state != 'value':
      raise LookupError(f'entry {name!r} is not here')
    return np.frombuffer(found.value, np.uint8)

  def head(self, name: str, num_bytes: int) -> bytes:
    """See `Entries`."""
    try:
      part = slice(0, num_bytes)
      return _done(self._store.read(name, byte_range=part)).value
    except ValueError:  # it is shorter
      return _done(self._store.read(name)).value

  def has(self, name: str, num_bytes: int) -> bool:
    """See `Entries`."""
    last = slice(num_bytes - 1, num_bytes)
    try:
      return _done(self._store.read(name, byte_range=last)).state == 'value'
    except ValueError:
      return False

  def delete(self, name: str) -> None:
    """See `Entries`."""
    _done(self._store.write(name, None))

  def names(self) -> list[str]:
    """See `Entries`."""
    found = (name.decode() for name in _done(self._store.list()))
    return [name for name in found if name.count('/') == 1]

  def close(self) -> None:
    del self._store


def _done(future: Any) -> Any:
  """What comes of a call of tensorstore, which has no deadlines of its own.

  Raises:
    TimeoutError: an OSError, as of any medium that failed.
  """
  try:
    return future.result(timeout=STORE_TIMEOUT_S)
  except TimeoutError:
    future.cancel()
    raise TimeoutError(f'no answer within {STORE_TIMEOUT_S:.0f} s') from None


def aligned(num_bytes: int) -> np.ndarray:
  """New memory, uint8, whose address is a multiple of `ALIGN_BYTES`."""
  memory = np.empty(num_bytes + ALIGN_BYTES, np.uint8)
  start = -memory.__array_interface__['data'][0] % ALIGN_BYTES
  return memory[start : start + num_bytes]


def _write_all(file: int, piece: memoryview) -> None:
  at = 0
  while at < len(piece):
    at += os.write(file, piece[at:])

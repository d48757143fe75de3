# SPDX-License-Identifier: Apache-2.0
"""A name for weights: the same bytes, the same name, in every process."""

import hashlib
import json
import os
from pathlib import Path
import tempfile
import time

from mooncake_jax.model.cache_folder import cache_folder

READ_BYTES = 4 << 20
# A file changed more lately may change again within one tick of its clock.
SETTLED_S = 2.0


def fingerprint(path: str | Path) -> str:
  """Hashes names and all bytes of a checkpoint's files.

  All of them: an edited checkpoint may differ in one matrix of hundreds, and
  its KVCache is not the other's. A file's digest is kept in `cache_folder()`
  for as long as its size and its time of change stay, so only the first
  process of a machine reads it: 16 GB in 16 s at 1 GB/s of disk.

  Args:
    path: a file, or a folder with all its files counted.

  Returns:
    16 hex digits. Like the checksums of blocks no defence against someone
    who wants a collision.

  Raises:
    FileNotFoundError: nothing is there.
  """
  root = Path(path)
  if not root.exists():
    raise FileNotFoundError(f'{root}: no checkpoint to fingerprint')
  files = (
    [root]
    if root.is_file()
    else sorted(p for p in root.rglob('*') if p.is_file())
  )
  whole = hashlib.sha256()
  for file in files:
    name = file.name if file == root else str(file.relative_to(root))
    whole.update(f'{name} {file.stat().st_size} {_digest(file)}\n'.encode())
  return whole.hexdigest()[:16]


def _digest(file: Path) -> str:
  """XXH3, 128 bits, of a file's bytes; from the cache if it has it."""
  kept = _kept_at(file)
  before = _state(file)
  try:
    state, digest = json.loads(kept.read_text())
    if state == before:
      return digest
  except (OSError, ValueError):
    pass  # not there, or of another version of this module
  digest = _hashed(file)
  settled = time.time_ns() - file.stat().st_mtime_ns > SETTLED_S * 1e9
  if settled and _state(file) == before:
    _keep(kept, json.dumps([before, digest]))
  return digest


def _state(file: Path) -> list[int]:
  """What changes with a file's bytes: times too, which `touch -r` can't set."""
  stat = file.stat()
  return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _kept_at(file: Path) -> Path:
  name = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]
  return cache_folder() / 'digests' / f'{name}.json'


def _hashed(file: Path) -> str:
  import xxhash  # here: a run of random weights needs none

  state = xxhash.xxh3_128()
  with file.open('rb', buffering=0) as stream:
    while part := stream.read(READ_BYTES):
      state.update(part)
  return state.hexdigest()


def _keep(at: Path, text: str) -> None:
  """Whole or not at all; where there is no room it is worked out again."""
  try:
    at.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile('w', dir=at.parent, delete=False) as made:
      made.write(text)
    os.replace(made.name, at)
  except OSError:
    pass

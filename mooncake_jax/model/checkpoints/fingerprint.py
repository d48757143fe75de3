# SPDX-License-Identifier: Apache-2.0
"""A name for weights: the same bytes, the same name, in every process."""

import hashlib
from pathlib import Path

SAMPLES = 64
SAMPLE_BYTES = 16 << 10


def fingerprint(path: str | Path) -> str:
  """Hashes names, sizes and evenly spread samples of a checkpoint's files.

  Args:
    path: a file, or a folder with all its files counted.

  Returns:
    16 hex digits. Sampled, as reading a large checkpoint twice would cost
    more than the odds of two that differ between the samples only.
  """
  root = Path(path)
  if not root.exists():
    raise FileNotFoundError(f'{root}: no checkpoint to fingerprint')
  files = (
    [root]
    if root.is_file()
    else sorted(p for p in root.rglob('*') if p.is_file())
  )
  digest = hashlib.sha256()
  for file in files:
    name = file.name if file == root else str(file.relative_to(root))
    digest.update(f'{name} {file.stat().st_size}\n'.encode())
    _sample(file, digest)
  return digest.hexdigest()[:16]


def _sample(file: Path, digest) -> None:
  size = file.stat().st_size
  step = max(size // SAMPLES, SAMPLE_BYTES)
  with file.open('rb') as stream:
    for offset in range(0, size, step):
      stream.seek(offset)
      digest.update(stream.read(SAMPLE_BYTES))

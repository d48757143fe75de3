# SPDX-License-Identifier: Apache-2.0
"""A process is killed while it writes blocks; the next one takes them over."""

from pathlib import Path
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mooncake_jax.backend import Replica
from mooncake_jax.transfer.ssd import SsdSegment
import write_blocks
from write_blocks import BLOCK
from write_blocks import block_key


def kill_after(folder: Path, root: Path, num_blocks: int, rest_s: float) -> int:
  """Kills a writer in the midst of a later block; returns how many it told."""
  command = [sys.executable, write_blocks.__file__, folder.as_uri()]
  with subprocess.Popen(
    command, cwd=root, env={'PYTHONPATH': str(root)}, stdout=subprocess.PIPE
  ) as writer:
    assert writer.stdout is not None
    told = [int(writer.stdout.readline()) for _ in range(num_blocks)]
    time.sleep(rest_s)
    writer.send_signal(signal.SIGKILL)
    told += [int(line) for line in writer.stdout]
  return len(told)


@pytest.mark.parametrize('rest_s', [0.0, 0.0013, 0.0031, 0.0057])
def test_a_killed_writers_whole_blocks_are_right_and_torn_ones_gone(
  tmp_path, root, rest_s
):
  num_told = kill_after(tmp_path, root, 5, rest_s)
  segment = SsdSegment('a/ssd', tmp_path.as_uri(), 1 << 30, BLOCK)
  adopted = dict(segment.adopt())
  assert num_told <= len(adopted) <= num_told + 1
  for i in range(len(adopted)):
    assert adopted[block_key(i)] == BLOCK.num_bytes(0, 4)
    replica = Replica('a/ssd', 100 + i, block_key(i))
    parts = [segment.read(replica, r) for r in segment.ranges(replica, 0, 4)]
    found = np.concatenate([part.slices[0] for part in parts])
    np.testing.assert_array_equal(found, write_blocks.block(i))
  segment.close()
  names = {path.name for path in tmp_path.rglob('*') if path.is_file()}
  assert names == {'.lock', '0-2', '2-4'}

# SPDX-License-Identifier: Apache-2.0
"""Where a pool's snapshots lie and what they must be of."""

from dataclasses import dataclass

from mooncake_jax.costs.model import check_positive


@dataclass(frozen=True)
class SnapshotSpec:
  """Snapshots of the pinned host memory of all prefill instances.

  Attributes:
    path: a folder for snapshots alone, or a URL that orbax knows; only the
      newest one stays.
    every_s: a snapshot is begun so often while requests are served, beside
      the one at the end; None is that one alone. While one is written it takes
      as much host memory again as it has blocks.
    loads: whether a run begins with what lies there.
    saves: whether it leaves snapshots.
  """

  path: str
  every_s: float | None = None
  loads: bool = True
  saves: bool = True

  def __post_init__(self):
    if self.every_s is not None:
      check_positive('SnapshotSpec.every_s', self.every_s)


@dataclass(frozen=True)
class PoolFormat:
  """What a block's bytes mean; one of another format is no use.

  Attributes:
    identity: seed of the block keys: model, weights and KVCache dtype.
    hash: how keys are made.
    sharding: bytes are canonical, [L, 2, S, K, H], whatever mesh they were on.
  """

  identity: str
  kv_dtype: str
  num_layers: int
  num_kv_heads: int
  head_dim: int
  block_size_tokens: int
  hash: str = 'sha256_cbor'
  sharding: str = 'canonical [L, 2, S, K, H]'

  @property
  def block_shape(self) -> tuple[int, int, int, int, int]:
    """Shape [L, 2, S, K, H] of a block."""
    S, K = self.block_size_tokens, self.num_kv_heads
    return self.num_layers, 2, S, K, self.head_dim

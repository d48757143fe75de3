# SPDX-License-Identifier: Apache-2.0
"""Strictness that is free, 8 simulated devices, and where the traces lie."""

from contextlib import ExitStack
import os
from pathlib import Path

from hypothesis import settings
import jax
import pytest

ROOT = Path(__file__).resolve().parents[1]

# Of an example: what else the machine does is nobody's mistake.
settings.register_profile('here', deadline=None)
settings.load_profile('here')
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
# A second run of the suite finds its programs compiled.
jax.config.update('jax_compilation_cache_dir', str(ROOT / '.jax_cache'))
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)


@pytest.fixture
def root() -> Path:
  """The repository's top folder."""
  return ROOT


@pytest.fixture(params=['virtual', 'device'])
def make_cluster(request):
  """Makes clusters on one backend; closes them."""
  import lifecycle  # once jax is configured

  with ExitStack() as stack:

    def make(spec=lifecycle.SPEC):
      if request.param == 'virtual':
        return lifecycle.make_virtual(spec)
      cluster = lifecycle.make_device(spec)
      stack.callback(lifecycle.close, cluster)
      return cluster

    yield make


@pytest.fixture(scope='session')
def traces() -> Path:
  """The folder of published traces; skips where there is none."""
  folder = os.environ.get('MOONCAKE_JAX_TRACES')
  if not folder:
    pytest.skip('MOONCAKE_JAX_TRACES is not set: no published traces here')
  return Path(folder)

# SPDX-License-Identifier: Apache-2.0
"""Strictness that is free, 8 simulated devices, and where the traces lie."""

from contextlib import ExitStack
import gc
import os
from pathlib import Path

from hypothesis import settings
import jax
import pytest

from scripts.program_cache import keep_programs

ROOT = Path(__file__).resolve().parents[1]
# Begun first, so that no worker is left alone with one of them at the end.
LONG = (
  'test_notebooks',
  'test_ray',
  'test_served_tokens',
  'test_assess',
  'test_stages',
  'test_hosts',
  'test_resume',
  'test_bench_soak',
  'test_device_check',
  'test_ray_elastic',
  'test_kernels',
  'test_goldens',
  'test_model_sharding',
  'test_sweep',
  'test_smollm2',
  'test_ray_drivers',
  'test_slurm_ray',
  'test_sim_worker',
)

# Of an example: what else the machine does is nobody's mistake.
settings.register_profile('here', deadline=None)
settings.load_profile('here')
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
# Other workers, and a second run of the suite, find programs compiled.
keep_programs(ROOT / '.jax_cache')


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Puts the files that take longest first."""
  place = {name: i for i, name in enumerate(LONG)}
  items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


def pytest_collection_finish() -> None:
  """Looks for cyclic garbage less often, and never among what was imported.

  With JAX in the process a pass takes a tenth of a second, and calls Python.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(20_000, 20, 20)


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

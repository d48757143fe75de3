# SPDX-License-Identifier: Apache-2.0
"""Ray on a machine where it starts slowly."""

import importlib.util

import pytest

from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.distributed.token import require_token

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('ray') is None, reason='Ray is not installed'
)
SLOW = 'The current node timed out during startup. This could happen because'


@pytest.mark.parametrize(
  ('errors', 'starts'), [([SLOW], 2), ([SLOW] * 9, 3), (['no port'] * 9, 1)]
)
def test_only_a_start_that_took_too_long_is_tried_again(
  monkeypatch, errors, starts
):
  require_token()  # before Ray is imported
  import ray

  from mooncake_jax.distributed.launching import join_ray

  begun, left = [], [*errors]

  def init(*args, **kwargs):
    begun.append(args)
    if left:
      raise Exception(left.pop())

  monkeypatch.setattr(ray, 'init', init)
  if len(errors) < starts:
    assert join_ray(RaySpec(), 1)
  else:
    with pytest.raises(Exception, match=errors[0]):
      join_ray(RaySpec(), 1)
  assert len(begun) == starts

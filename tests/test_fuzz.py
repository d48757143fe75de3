# SPDX-License-Identifier: Apache-2.0
"""Random clusters end every request once, leak nothing, believe the truth."""

import pytest

from fuzz import Trial


@pytest.mark.parametrize('first', range(0, 400, 40))
def test_random_clusters_keep_their_promises(first):
  for seed in range(first, first + 40):
    Trial(seed).run()

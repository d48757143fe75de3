# SPDX-License-Identifier: Apache-2.0
"""Soft pins over an SSD: the smallest case that the state machine found."""

from test_master_machine import MasterMachine


def test_a_soft_pinned_block_stays_while_others_are_elsewhere_too():
  machine = MasterMachine()
  ended = {'tenant': 'x', 'end': True}
  machine.put_chain('a', 3, 1, pin='none', **ended)
  machine.put_chain('b', 3, 3, pin='none', **ended)
  machine.put_chain('a', 4, 2, pin='soft', **ended)
  machine.put_chain('a', 0, 4, pin='none', **ended)
  machine.offload()
  machine.put_chain('a', 1, 1, pin='none', **ended)
  machine.agrees()

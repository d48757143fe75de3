# SPDX-License-Identifier: Apache-2.0
"""Hostile clients, a few of the ten thousand of scripts/fuzz_gateway.py."""

from collections import Counter
import os
import threading
import time

from gateway_pieces import running
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.gateway.limits import GatewaySpec
from scripts.fuzz_gateway import attack
from scripts.fuzz_gateway import well
from scripts.fuzzing import wire
from scripts.fuzzing.ledger import Held
from scripts.fuzzing.ledger import leaks
from scripts.fuzzing.ledger import look
from scripts.fuzzing.ledger import settled
from scripts.fuzzing.server import Server
from tiny_experiment import tiny

SPEC = GatewaySpec(model_name='tiny', max_output_tokens=200, max_choices=8)


def test_hostile_clients_leave_nothing_behind():
  rules = ConductorSpec(admission='none')
  with running(tiny(backend='virtual', gateway=SPEC, conductor=rules)) as here:
    server = Server(os.getpid(), here.port)
    assert attack(server, 'tiny', range(60)) == []
    before = settled(server.pid, server.url)
    assert attack(server, 'tiny', range(60, 260)) == []
    after = settled(server.pid, server.url)
    assert leaks(before, after, most_growth=0.2) == []
    assert well(server, 'tiny') == []
  deadline_s = time.monotonic() + 10
  while any(t.name == 'serve' for t in threading.enumerate()):
    assert time.monotonic() < deadline_s


def test_every_kind_of_hostility_is_drawn_and_drawn_again():
  cases = [wire.case(seed, 'tiny') for seed in range(300)]
  assert cases == [wire.case(seed, 'tiny') for seed in range(300)]
  names = Counter(case.name.rpartition(' ')[2] for case in cases)
  assert len(names) == 8 and min(names.values()) >= 3
  assert {case.ending for case in cases} == {
    'read',
    'half',
    'close',
    'reset',
    'peek',
  }


def test_a_leak_is_told():
  before = Held(100, 5, 10, 0, 0)
  assert leaks(before, before, 0.1) == []
  for name, value in (
    ('rss_bytes', 120),
    ('threads', 14),
    ('files', 15),
    ('running', 1),
    ('used_tokens', 8),
  ):
    (told,) = leaks(before, before._replace(**{name: value}), 0.1)
    assert told.startswith(name)


def test_a_server_that_fails_or_hangs_up_is_told():
  with running(tiny(backend='virtual', gateway=SPEC)) as here:
    held = look(os.getpid(), here.url)
    assert held.running == 0 and held.rss_bytes > 0
    here.made.served = None  # pyright: ignore[reportAttributeAccessIssue]
    told = attack(Server(os.getpid(), here.port), 'tiny', range(40))
    assert told and all('500' in each for each in told)

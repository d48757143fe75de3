# SPDX-License-Identifier: Apache-2.0
"""What was put out is reused by who goes on from it, on both backends."""

from dataclasses import replace

import numpy as np
import pytest

from lifecycle import close
from lifecycle import COSTS
from lifecycle import LAYERS
from lifecycle import make_conductor
from lifecycle import make_device
from lifecycle import make_request
from lifecycle import make_virtual
from lifecycle import SPEC
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.blocks.segments import ssd_segment
from mooncake_jax.instance.outputs import chain_keys
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend

# One prefill instance, so that the second turn finds what the first left.
ONE = replace(SPEC, prefill_instances=1)
PROMPT = np.random.default_rng(3).integers(2, 60, 21)
MORE = np.random.default_rng(4).integers(2, 60, 6)
OUTPUT = 20  # 40 tokens have their KVCache at the end: five blocks of eight


def two_turns(cluster, output):
  """Records of a prompt, and of one that goes on from it and its output."""

  def next_turn(record):
    if record.request_id == 'second':
      return None
    answer = record.output_tokens or output
    prompt = np.concatenate([PROMPT, answer, MORE])
    return make_request('second', prompt, 9, record.finished_s + 0.2)

  whole = np.concatenate([PROMPT, output])
  keys = prefix_keys(whole, SPEC.block_size_tokens)[2:]
  first = make_request('first', PROMPT, OUTPUT, output_block_keys=keys)
  records, _ = serve([first], make_conductor(ONE), cluster, follow_up=next_turn)
  cluster.check()
  assert [r.outcome for r in records] == ['completed'] * 2
  return records


@pytest.mark.parametrize('partners', [{}, {'prefill0': 'decode0'}])
def test_what_decode_puts_to_another_host_crosses_the_network(partners):
  """Also straight to its SSD; a pair on the same devices has one host."""
  for segment in ('prefill0', ssd_segment('prefill0')):
    backend = VirtualBackend(COSTS, LAYERS, partners=partners)
    replica = Replica(segment, 1)
    op = TransferOp(DevicePages('decode0', (1,)), replica, 0, 2, 1000)
    backend.transfer((op,), 2, 9.0)
    backend.wait(None)
    carried = {*backend.link_uses()}
    crossed = {('out', 'decode0'), ('in', 'prefill0')}
    assert carried & crossed == (set() if partners else crossed)
    assert all(use.num_bytes == 1000 for use in backend.link_uses().values())


def test_on_devices_the_next_turn_hits_the_output_with_the_same_tokens():
  output = np.zeros(OUTPUT, int)  # not what the model says: never used
  turns = {}
  for spec in (
    ONE,
    replace(ONE, store_output=False),
    replace(ONE, reuse=False),
  ):
    cluster = make_device(spec)
    turns[spec.reuse, spec.store_output] = two_turns(cluster, output)
    close(cluster)
  tokens = [[r.output_tokens for r in records] for records in turns.values()]
  assert tokens[0] == tokens[1] == tokens[2]
  assert turns[True, True][1].reused_tokens == {'local_host': 40}
  assert turns[True, False][1].reused_tokens == {'local_host': 16}


@pytest.mark.parametrize('store_output, tokens', [(True, 40), (False, 16)])
def test_in_a_simulation_the_workload_names_the_outputs_blocks(
  store_output, tokens
):
  cluster = make_virtual(replace(ONE, store_output=store_output))
  output = np.random.default_rng(5).integers(2, 60, OUTPUT)
  records = two_turns(cluster, output)
  assert records[1].reused_tokens == {'local_host': tokens}


def test_outputs_that_nobody_can_name_are_not_stored():
  cluster = make_virtual(ONE)
  request = replace(make_request('a', PROMPT, OUTPUT), prompt=None)
  serve([request], make_conductor(ONE), cluster)
  assert {*cluster.inventory('prefill0')} == {*request.block_keys}


def test_an_output_of_one_token_puts_nothing_that_has_not_arrived():
  """Its end comes with the prefill's, before its KVCache is handed over."""
  spec = replace(ONE, host_bytes=2 * 8 * 3 * 128)  # two blocks of five
  cluster = make_virtual(spec)
  request = make_request('a', np.arange(41) + 2, 1, output_block_keys=(b'x',))
  steps = []
  serve(
    [request],
    make_conductor(spec),
    cluster,
    on_event=lambda e: steps.append(getattr(e, 'step', '')),
  )
  assert 'put' in steps and 'put_output' not in steps


def test_keys_of_an_output_continue_the_prompts_chain():
  output = np.random.default_rng(6).integers(2, 60, 30).tolist()
  whole = np.concatenate([PROMPT, output])
  for count in (0, 5, 21):  # less than a block, and more than two
    prompt = PROMPT[: count or 1]
    request = replace(make_request('a', prompt), tenant='t', identity='model')
    text = np.concatenate([prompt, output])
    keys = prefix_keys(text, 8, 'model', salt='t')
    request = replace(request, block_keys=keys[: len(prompt) // 8])
    assert chain_keys(request, output, len(text), 8) == keys
    assert chain_keys(request, output, 17, 8) == keys[:2]
  assert prefix_keys(whole, 8, known=prefix_keys(whole[:30], 8)) == (
    prefix_keys(whole, 8)
  )


def test_unknown_outputs_are_named_by_their_request():
  bare = replace(make_request('a', PROMPT), prompt=None)
  keys = chain_keys(bare, (), 45, 8)
  assert keys[:2] == bare.block_keys and len({*keys}) == 5
  # A run that goes on from there gives them the same names.
  longer = replace(bare, num_prompt_tokens=30, block_keys=keys[:3])
  assert chain_keys(longer, (), 45, 8) == keys
  other = replace(bare, request_id='b')
  assert not {*chain_keys(other, (), 45, 8)[2:]} & {*keys}

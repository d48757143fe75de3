# SPDX-License-Identifier: Apache-2.0
"""docs/serving.md names what the server really has."""

from pathlib import Path
import re

from gateway_pieces import running
from mooncake_jax.gateway.limits import GatewaySpec
from mooncake_jax.gateway.schema import ChatRequest
from mooncake_jax.gateway.schema import CompletionRequest
from tiny_experiment import tiny

PAGE = (Path(__file__).parents[1] / 'docs/serving.md').read_text()


def test_every_metric_path_and_field_is_named_and_no_other():
  spec = GatewaySpec(model_name='tiny')
  with running(tiny(backend='virtual', gateway=spec)) as server:
    families = server.made.measures.registry.collect()
    paths = server.get('/openapi.json')[2]['paths']
  have = {f.name + ('_total' if f.type == 'counter' else '') for f in families}
  assert {*re.findall(r'`(mooncake_\w+)`', PAGE)} == have
  for path in paths:
    assert f'{path}`' in PAGE, path
  only_defaults = {
    'suffix',
    'best_of',
    'presence_penalty',
    'frequency_penalty',
    'repetition_penalty',
    'logit_bias',
    'response_format',
  }
  named = {*re.findall(r'`(\w+)`', PAGE.split('Fields:')[1].split('##')[0])}
  fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
  assert fields - only_defaults <= named

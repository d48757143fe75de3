# SPDX-License-Identifier: Apache-2.0
"""Where each parameter lies in a Hugging Face checkpoint: one table.

A stored tensor's dimensions are written as groups of our axis letters: 'KGH D'
is a matrix whose rows run over KV head, query group and head dim, in that
order, and whose columns over the model dim. Together with the axes declared in
`params.py` ('DKGH') this says all about the reshape and the transposition.
"""

from collections.abc import Iterator
import math
from typing import NamedTuple

import jax
import numpy as np

from mooncake_jax.model import params as params_lib
from mooncake_jax.model.params import Params
from mooncake_jax.model_config import ModelConfig

# Parameter -> (name in the checkpoint, its dimensions).
TABLES = {
  'embed': ('model.embed_tokens.weight', 'V D'),
  'final_norm': ('model.norm.weight', 'D'),
  'unembed': ('lm_head.weight', 'V D'),
}
LAYER = {
  'attn_norm': ('input_layernorm.weight', 'D'),
  'wq': ('self_attn.q_proj.weight', 'KGH D'),
  'wk': ('self_attn.k_proj.weight', 'KH D'),
  'wv': ('self_attn.v_proj.weight', 'KH D'),
  'wo': ('self_attn.o_proj.weight', 'D KGH'),
  'bq': ('self_attn.q_proj.bias', 'KGH'),
  'bk': ('self_attn.k_proj.bias', 'KH'),
  'bv': ('self_attn.v_proj.bias', 'KH'),
  'q_norm': ('self_attn.q_norm.weight', 'H'),
  'k_norm': ('self_attn.k_norm.weight', 'H'),
  'mlp_norm': ('post_attention_layernorm.weight', 'D'),
  'w_gate': ('mlp.gate_proj.weight', 'F D'),
  'w_up': ('mlp.up_proj.weight', 'F D'),
  'w_down': ('mlp.down_proj.weight', 'D F'),
}


class Stored(NamedTuple):
  """One tensor of a checkpoint, and the parameter that it holds.

  Attributes:
    name: in the checkpoint, 'model.layers.0.self_attn.q_proj.weight'.
    groups: sizes of our axes that each of its dimensions runs over; for 9
      query and 3 KV heads of 64 and D = 576, ((3, 3, 64), (576,)).
    order: our axes as positions in the flattened groups; for wq, DKGH from
      KGH D, (3, 0, 1, 2).
  """

  name: str
  groups: tuple[tuple[int, ...], ...]
  order: tuple[int, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape in the checkpoint."""
    return tuple(math.prod(group) for group in self.groups)

  @property
  def split_shape(self) -> tuple[int, ...]:
    """Shape with every dimension split into our axes, in stored order."""
    return sum(self.groups, ())

  @property
  def inverse(self) -> tuple[int, ...]:
    """Stored axes as positions in ours: (1, 2, 3, 0) for wq."""
    return tuple(self.order.index(i) for i in range(len(self.order)))


def stored_tree(config: ModelConfig) -> Params:
  """The tree of parameters with a `Stored` at each leaf, layers a tuple."""
  declared = params_lib.declarations(config)
  layers = tuple(
    {
      key: _stored(config, LAYER, key, d, f'model.layers.{i}.')
      for key, d in layer.items()
    }
    for i, layer in enumerate(declared.pop('layers'))
  )
  tables = {key: _stored(config, TABLES, key, d) for key, d in declared.items()}
  return {**tables, 'layers': layers}


def all_stored(config: ModelConfig) -> Iterator[Stored]:
  """Every tensor that a checkpoint of this model holds."""
  tree = stored_tree(config)
  for layer in tree.pop('layers'):
    yield from layer.values()
  yield from tree.values()


def tensors(
  params: Params, config: ModelConfig
) -> Iterator[tuple[Stored, np.ndarray]]:
  """Every tensor of the checkpoint that these parameters make, on the host.

  Layers may be stacked; a copy of tied embeddings is left out.
  """
  unstacked = params_lib.unstack_layers(params)
  tree = stored_tree(config)
  for stored, layer in zip(tree.pop('layers'), unstacked['layers']):
    yield from (
      (stored[key], _tensor(stored[key], layer[key])) for key in stored
    )
  for key, stored in tree.items():
    yield stored, _tensor(stored, unstacked[key])


def _tensor(stored: Stored, value: jax.Array) -> np.ndarray:
  split = np.asarray(value).transpose(stored.inverse)
  return np.ascontiguousarray(split.reshape(stored.shape))


def _stored(
  config: ModelConfig,
  table: dict[str, tuple[str, str]],
  key: str,
  declared: params_lib.Declaration,
  prefix: str = '',
) -> Stored:
  name, dims = table[key]
  sizes = params_lib.axis_sizes(config)
  letters = dims.replace(' ', '')
  return Stored(
    prefix + name,
    tuple(tuple(sizes[a] for a in group) for group in dims.split()),
    tuple(letters.index(axis) for axis in declared.axes),
  )

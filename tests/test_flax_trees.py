# SPDX-License-Identifier: Apache-2.0
"""Parameters to real flax modules and back, linen and nnx."""

from pathlib import Path

from flax import linen
from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from mooncake_jax.model.checkpoints import flax as flax_trees
from mooncake_jax.model.checkpoints.load import load_model
from mooncake_jax.model.params import stack_layers
from mooncake_jax.model.sharding import make_mesh
from mooncake_jax.model_config import ModelConfig
from tests.trees import same

DATA = Path(__file__).parent / 'data'
FAMILIES = ['llama_9_3', 'qwen2', 'qwen3']


def widths(config: ModelConfig) -> dict[str, tuple[int, int]]:
  """Of each projection: in, out."""
  D, F = config.model_dim, config.mlp_dim
  q = config.num_heads * config.head_dim
  kv = config.num_kv_heads * config.head_dim
  attention = {'q_proj': (D, q), 'k_proj': (D, kv), 'v_proj': (D, kv)}
  mlp = {'gate_proj': (D, F), 'up_proj': (D, F), 'down_proj': (F, D)}
  return {**attention, 'o_proj': (q, D), **mlp}


class NnxGroup(nnx.Module):
  """Projections of attention or MLP."""

  def __init__(self, config: ModelConfig, names: str, rngs: nnx.Rngs):
    for name in names.split():
      bias = config.qkv_bias and name[0] in 'qkv'
      size = widths(config)[name]
      setattr(self, name, nnx.Linear(*size, use_bias=bias, rngs=rngs))
    if config.qk_norm and 'q_proj' in names:
      self.q_norm = nnx.RMSNorm(config.head_dim, rngs=rngs)
      self.k_norm = nnx.RMSNorm(config.head_dim, rngs=rngs)


class NnxLayer(nnx.Module):
  """One decoder layer's parameters."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    norm = lambda: nnx.RMSNorm(config.model_dim, rngs=rngs)  # noqa: E731
    self.input_layernorm, self.post_attention_layernorm = norm(), norm()
    self.self_attn = NnxGroup(config, 'q_proj k_proj v_proj o_proj', rngs)
    self.mlp = NnxGroup(config, 'gate_proj up_proj down_proj', rngs)


class NnxModel(nnx.Module):
  """The parameters below `model`."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    V, D = config.vocab_size, config.model_dim
    self.embed_tokens = nnx.Embed(V, D, rngs=rngs)
    layers = [NnxLayer(config, rngs) for _ in range(config.num_layers)]
    self.layers = nnx.List(layers)
    self.norm = nnx.RMSNorm(D, rngs=rngs)


class NnxCausalLM(nnx.Module):
  """A whole model, as an nnx user would name it."""

  def __init__(self, config: ModelConfig):
    rngs = nnx.Rngs(0)
    self.model = NnxModel(config, rngs)
    if not config.tie_embeddings:
      V, D = config.vocab_size, config.model_dim
      self.lm_head = nnx.Linear(D, V, use_bias=False, rngs=rngs)


class LinenGroup(linen.Module):
  """Projections of attention or MLP, each applied to zeros."""

  config: ModelConfig
  names: str

  @linen.compact
  def __call__(self):
    for name in self.names.split():
      size_in, size_out = widths(self.config)[name]
      bias = self.config.qkv_bias and name[0] in 'qkv'
      linen.Dense(size_out, use_bias=bias, name=name)(jnp.zeros(size_in))
    if self.config.qk_norm and 'q_proj' in self.names:
      for name in ('q_norm', 'k_norm'):
        linen.RMSNorm(name=name)(jnp.zeros(self.config.head_dim))


class LinenLayer(linen.Module):
  """One decoder layer's parameters."""

  config: ModelConfig

  def setup(self):
    self.input_layernorm = linen.RMSNorm()
    self.post_attention_layernorm = linen.RMSNorm()
    self.self_attn = LinenGroup(self.config, 'q_proj k_proj v_proj o_proj')
    self.mlp = LinenGroup(self.config, 'gate_proj up_proj down_proj')

  def __call__(self, x):
    self.self_attn()
    self.mlp()
    return self.post_attention_layernorm(self.input_layernorm(x))


class LinenModel(linen.Module):
  """The parameters below `model`."""

  config: ModelConfig

  def setup(self):
    self.embed_tokens = linen.Embed(
      self.config.vocab_size, self.config.model_dim
    )
    self.layers = [
      LinenLayer(self.config) for _ in range(self.config.num_layers)
    ]
    self.norm = linen.RMSNorm()

  def __call__(self, token):
    x = self.embed_tokens(token)
    for layer in self.layers:
      x = layer(x)
    return self.norm(x)


class LinenCausalLM(linen.Module):
  """A whole model, as a linen user would name it."""

  config: ModelConfig

  def setup(self):
    self.model = LinenModel(self.config)
    if not self.config.tie_embeddings:
      self.lm_head = linen.Dense(self.config.vocab_size, use_bias=False)

  def __call__(self, token):
    x = self.model(token)
    return x if self.config.tie_embeddings else self.lm_head(x)


def linen_variables(config: ModelConfig):
  return LinenCausalLM(config).init(jax.random.key(0), jnp.int32(0))


@pytest.mark.parametrize('name', FAMILIES)
def test_nnx_round_trip_is_the_identity(name):
  config, params = load_model(DATA / name)
  module = NnxCausalLM(config)
  state = nnx.state(module, nnx.Param)
  shapes = lambda s: jax.tree.map(jnp.shape, nnx.to_pure_dict(s))  # noqa: E731
  ours = flax_trees.to_nnx(params, config)
  assert shapes(ours) == shapes(state)
  nnx.update(module, ours)
  back = flax_trees.from_flax(nnx.state(module, nnx.Param), config)
  assert same(back, params)


@pytest.mark.parametrize('name', FAMILIES)
def test_linen_round_trip_is_the_identity(name):
  config, params = load_model(DATA / name)
  expected = linen_variables(config)['params']
  tree = flax_trees.to_linen(stack_layers(params), config)
  shapes = lambda t: jax.tree.map(jnp.shape, t)  # noqa: E731
  assert shapes(tree) == shapes(expected)
  for form in (tree, {'params': tree}, linen.FrozenDict({'params': tree})):
    assert same(flax_trees.from_flax(form, config), params)


def test_a_module_computes_what_its_parameters_say():
  config, params = load_model(DATA / 'qwen2')
  tree = flax_trees.to_linen(params, config)
  dense = linen.Dense(config.num_heads * config.head_dim)
  x = jnp.linspace(-1, 1, config.model_dim)
  leaf = tree['model']['layers_1']['self_attn']['q_proj']
  y_N = np.asarray(dense.apply({'params': leaf}, x))
  layer = params['layers'][1]
  y_KGH = jnp.einsum('D,DKGH->KGH', x, layer['wq']) + layer['bq']
  assert np.allclose(y_N, y_KGH.reshape(-1), atol=1e-5)


def test_a_tree_goes_onto_a_mesh_and_comes_back():
  config, params = load_model(DATA / 'qwen3')
  mesh = make_mesh(jax.devices()[:4], config)
  tree = flax_trees.to_nnx(params, config)
  sharded = flax_trees.from_flax(tree, config, mesh)
  assert len(sharded['layers'][0]['wq'].sharding.device_set) == 4
  tree = flax_trees.to_linen(sharded, config)
  assert same(flax_trees.from_flax(tree, config), params)


def test_a_tree_that_does_not_fit_is_refused():
  config, params = load_model(DATA / 'qwen3')
  tree = flax_trees.to_linen(params, config)
  del tree['model']['layers_1']['self_attn']['q_norm']
  with pytest.raises(ValueError, match=r'linen.*layers\.1.*q_norm.*missing'):
    flax_trees.from_flax(tree, config)
  tree = flax_trees.to_linen(params, config)
  tree['lm_head']['kernel'] = tree['lm_head']['kernel'][:-1]
  with pytest.raises(ValueError, match=r'lm_head.*\(96, 63\).*\(96, 64\)'):
    flax_trees.from_flax(tree, config)

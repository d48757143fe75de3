# SPDX-License-Identifier: Apache-2.0
"""The instances that a cluster's spec asks for."""

from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.instance import ParamsSource
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.engine.spec import Role
from mooncake_jax.model_config import ModelConfig

KV_DTYPES = {1: 'float8_e4m3fn', 2: 'bfloat16', 4: 'float32'}
SMALLEST_CHUNK = 32


def device_backend(
  spec: ClusterSpec,
  model: ModelConfig,
  params: ParamsSource,
  *,
  unroll: bool = True,
) -> DeviceBackend:
  """Makes the backend of a cluster: prefill instances first on the devices.

  Args:
    params: a tree, or what loads one onto a mesh.
    unroll: see `InstanceSpec`.

  Raises:
    ValueError: there are too few devices, or `kv_dtype_bytes` is no dtype.
  """
  if spec.kv_dtype_bytes not in KV_DTYPES:
    raise ValueError(
      f'ClusterSpec.kv_dtype_bytes={spec.kv_dtype_bytes} must be one of '
      f'{sorted(KV_DTYPES)}'
    )
  return DeviceBackend(
    model,
    spec.layout(model),
    instance_specs(spec, model, unroll),
    params,
    kv_dtype=KV_DTYPES[spec.kv_dtype_bytes],
  )


def instance_specs(
  spec: ClusterSpec, model: ModelConfig, unroll: bool = True
) -> list[InstanceSpec]:
  """Returns what each instance of the cluster is made of."""

  def instance(
    name: str, role: Role, num_pages: int, host_bytes: int
  ) -> InstanceSpec:
    return InstanceSpec(
      name,
      role,
      num_pages,
      spec.max_request_tokens(model),
      num_devices=spec.tensor_parallel,
      chunk_buckets=chunk_buckets(spec.chunk_tokens),
      max_batch=spec.max_batch,
      host_bytes=host_bytes,
      unroll=unroll,
    )

  return [
    *(
      instance(name, 'prefill', spec.prefill_pages, spec.host_bytes)
      for name in spec.prefill_names
    ),
    *(
      instance(name, 'decode', spec.decode_pages, 0)
      for name in spec.decode_names
    ),
  ]


def chunk_buckets(chunk_tokens: int) -> tuple[int, ...]:
  """Lengths that chunks are padded to, each a quarter of the next.

  For 512: 32, 128, 512. A short last chunk costs little, few are compiled.
  """
  buckets = [chunk_tokens]
  while buckets[-1] // 4 >= SMALLEST_CHUNK:
    buckets.append(buckets[-1] // 4)
  return tuple(reversed(buckets))

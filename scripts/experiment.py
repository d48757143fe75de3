# SPDX-License-Identifier: Apache-2.0
"""An experiment: the value that a run file builds."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import get_args
from typing import Literal

from mooncake_jax.changes import Changes
from mooncake_jax.cluster_members import Role
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.costs.model import CostModel
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.gateway.limits import GatewaySpec
from mooncake_jax.model.kernels import AttentionChoice
from mooncake_jax.slo import SLO
from mooncake_jax.systems.vllm import VllmSpec
from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.snapshot_spec import SnapshotSpec
from scripts.models import Model
from scripts.workloads import Workload


@dataclass(frozen=True)
class Experiment:
  """One workload on one cluster.

  Attributes:
    title: one line; heads the table and the report.
    model: what is served.
    cluster: instances and pools.
    conductor: policy and admission.
    slo: the limits that effective requests keep.
    costs: what the Conductor believes work takes.
    instances: the same for instances that differ, by name.
    workload: the requests; None where clients send them (scripts/serve.py).
    backend: 'device' serves on JAX devices, 'virtual' simulates, 'ray' serves
      on devices with a process an instance.
    ray: where those processes run, and how they send each other KVCache.
    store: the Mooncake Store that a cluster with `mooncake_bytes` shares with
      others, on devices, be they of one process or of many; a simulation has
      its own.
    truth: what work really takes in a simulation; None is `costs`, an oracle.
    true_instances: the same for instances that differ; None is `instances`.
    attention: the kernel on devices; see `InstanceSpec`.
    compare_reuse: serve the same requests once more with reuse off.
    show_answers: print so many of the outputs.
    vllm: serves instead of the cluster, in a simulation: coupled instances, to
      compare with; the conductor and most of the cluster have no part then.
    changes: what happens while it runs.
    gateway: limits of the server.
    tokenizer: whose text a simulation speaks to clients; None is the model's.
    snapshot: what pinned host memory begins with and is kept as, on devices
      of one process.
    keeps_journal: whether all that happened is kept, for timelines and to
      replay it; a large simulation takes less memory and time without.
  """

  title: str
  model: Model
  cluster: ClusterSpec
  conductor: ConductorSpec
  slo: SLO
  costs: CostModel
  workload: Workload | None = None
  backend: Literal['device', 'virtual', 'ray'] = 'virtual'
  ray: RaySpec | None = None
  truth: CostModel | None = None
  instances: Mapping[str, CostModel] = field(default_factory=dict)
  true_instances: Mapping[str, CostModel] | None = None
  store: MooncakeConfig | None = None
  attention: AttentionChoice = 'auto'
  compare_reuse: bool = False
  show_answers: int = 0
  vllm: VllmSpec | None = None
  changes: Changes = Changes()
  gateway: GatewaySpec = GatewaySpec()
  tokenizer: Model | None = None
  snapshot: SnapshotSpec | None = None
  keeps_journal: bool = True

  def __post_init__(self):
    for name in ('truth', 'true_instances', 'vllm'):
      if getattr(self, name) is not None and self.backend != 'virtual':
        raise ValueError(
          f'Experiment.{name}={getattr(self, name)} needs '
          'Experiment.backend="virtual"'
        )
    if self.snapshot is not None and self.backend != 'device':
      raise ValueError(
        f'Experiment.snapshot={self.snapshot} needs Experiment.backend='
        f'"device", not {self.backend!r}'
      )
    if self.tokenizer is not None and self.backend != 'virtual':
      raise ValueError(
        f'Experiment.tokenizer={self.tokenizer}: on devices the model has its '
        'own'
      )
    known = (*self.cluster.prefill_names, *self.cluster.decode_names)
    for name in (*self.instances, *(self.true_instances or ())):
      if name not in known:
        raise ValueError(
          f'Experiment.instances: {name!r} is not one of {", ".join(known)}'
        )
    self._check_ray()
    self._check_roles()
    needs_store = not self.is_simulated and self.cluster.mooncake_bytes > 0
    if needs_store != (self.store is not None):
      raise ValueError(
        f'Experiment.store={self.store} and ClusterSpec.mooncake_bytes='
        f'{self.cluster.mooncake_bytes}: on devices one needs the other, a '
        'simulation takes no store'
      )

  @property
  def num_nodes(self) -> int:
    """Of whatever serves."""
    return self.cluster.num_nodes if self.vllm is None else self.vllm.instances

  @property
  def is_simulated(self) -> bool:
    """Whether nothing is computed, be it in one process or in many."""
    return self.backend == 'virtual' or (
      self.ray is not None and self.ray.simulated
    )

  def _check_roles(self) -> None:
    changed = [c for c in self.changes.changes if c.what in get_args(Role)]
    is_made = self.is_simulated or self.cluster.switchable
    if not is_made and (changed or self.conductor.roles):
      raise ValueError(
        f'Experiment.changes={changed} and ConductorSpec.roles='
        f'{self.conductor.roles}: on devices roles change only with '
        'ClusterSpec.switchable=True'
      )

  def _check_ray(self) -> None:
    if (self.backend == 'ray') != (self.ray is not None):
      raise ValueError(
        f'Experiment.ray={self.ray} and Experiment.backend={self.backend!r}: '
        "backend='ray' needs a RaySpec, no other takes one"
      )
    cluster = self.cluster
    if self.backend == 'ray' and cluster.colocated:
      raise ValueError(
        f"ClusterSpec.colocated={cluster.colocated}: Experiment.backend='ray' "
        'has no pairs'
      )
    if self.ray and self.ray.simulated and cluster.mooncake_bytes:
      raise ValueError(
        f'ClusterSpec.mooncake_bytes={cluster.mooncake_bytes}: processes of '
        'RaySpec.simulated=True share no store'
      )

# SPDX-License-Identifier: Apache-2.0
"""Workloads as values that configs bind: what a run is asked."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import os
from pathlib import Path
from typing import Literal
from typing import Protocol

from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import Sampling
from mooncake_jax.serve import FollowUp
from mooncake_jax.workload.bailian import BAILIAN_TOKENS_PER_HASH_ID
from mooncake_jax.workload.bailian import load_bailian
from mooncake_jax.workload.csv_traces import load_azure
from mooncake_jax.workload.csv_traces import load_burstgpt
from mooncake_jax.workload.scale import scale_trace
from mooncake_jax.workload.scale import TraceScale
from mooncake_jax.workload.tokens import to_requests
from mooncake_jax.workload.tokens import TokenMaker
from mooncake_jax.workload.trace import load_trace
from mooncake_jax.workload.trace import TOKENS_PER_HASH_ID
from mooncake_jax.workload.trace import TraceRow
from scripts.models import Model

TRACES = 'MOONCAKE_JAX_TRACES'


@dataclass
class Prepared:
  """A workload made ready for one run.

  Attributes:
    requests: known before the run; `follow_up` makes the others.
    total: how many requests there will be, if none fails.
    follow_up: see `serve`.
    tell: a request and its answer as text, where they are text.
    errors: one line for each request that could not be made, so far.
  """

  requests: Sequence[Request]
  total: int
  follow_up: FollowUp | None = None
  tell: Callable[[RequestRecord], str] | None = None
  errors: list[str] = field(default_factory=list)


class Workload(Protocol):
  """Anything that can be made ready for a run."""

  def prepare(
    self, model: Model, config: ModelConfig, cluster: ClusterSpec, tokens: bool
  ) -> Prepared:
    """Makes requests, with token ids if `tokens`, else from lengths."""
    ...


TraceFormat = Literal['mooncake', 'azure', 'burstgpt', 'bailian']
_LOADERS: dict[
  TraceFormat, Callable[[str], tuple[list[TraceRow], list[str]]]
] = {
  'mooncake': load_trace,
  'azure': load_azure,
  'burstgpt': load_burstgpt,
  'bailian': load_bailian,
}


@dataclass(frozen=True)
class Rows:
  """Trace rows and the bad lines met on the way."""

  rows: list[TraceRow]
  errors: list[str]
  tokens_per_hash_id: int = TOKENS_PER_HASH_ID


def published(name: str, trace_format: TraceFormat = 'mooncake') -> Rows:
  """A published trace from the folder in MOONCAKE_JAX_TRACES.

  Raises:
    ValueError: the variable is not set, or the file is of another format.
    OSError: there is no such file.
  """
  folder = os.environ.get(TRACES)
  if folder is None:
    raise ValueError(f'{name}: {TRACES} is not set to the folder of traces')
  return from_file(str(Path(folder) / name), trace_format)


def from_file(path: str, trace_format: TraceFormat = 'mooncake') -> Rows:
  """A trace in a published format, see the loaders in `workload/`.

  Raises:
    ValueError: the file is of another format: none of its lines can be read.
    OSError: there is no such file.
  """
  rows, errors = _LOADERS[trace_format](path)
  if errors and not rows:
    raise ValueError(f'not a trace in format {trace_format!r}: {errors[0]}')
  if trace_format == 'bailian':
    return Rows(rows, errors, BAILIAN_TOKENS_PER_HASH_ID)
  return Rows(rows, errors)


@dataclass(frozen=True)
class TraceWorkload:
  """Requests of a trace, generated or recorded.

  Attributes:
    rows: of the trace.
    scale: which of them, and how long they are here.
    sampling: how output tokens are drawn.
    seed: of the prompts' tokens.
  """

  rows: list[TraceRow] | Rows
  scale: TraceScale = TraceScale()
  sampling: Sampling = Sampling()
  seed: int = 0

  def prepare(
    self, model: Model, config: ModelConfig, cluster: ClusterSpec, tokens: bool
  ) -> Prepared:
    read = self.rows if isinstance(self.rows, Rows) else Rows(self.rows, [])
    scaled = scale_trace(read.rows, self.scale, read.tokens_per_hash_id)
    maker = self._maker(config, scaled.tokens_per_hash_id) if tokens else None
    requests = to_requests(
      scaled.rows,
      block_size_tokens=cluster.block_size_tokens,
      tokens_per_hash_id=scaled.tokens_per_hash_id,
      maker=maker,
      identity=model.identity(cluster.kv_dtype) if tokens else '0',
      sampling=self.sampling,
    )
    errors = [*read.errors, *_limits(scaled.num_dropped, scaled.num_cut)]
    return Prepared(requests, len(requests), errors=errors)

  def _maker(self, config: ModelConfig, tokens_per_hash_id: int) -> TokenMaker:
    return TokenMaker(
      config.vocab_size,
      excluded_tokens=config.eos_token_ids,
      tokens_per_hash_id=tokens_per_hash_id,
      seed=self.seed,
    )


def _limits(num_dropped: int, num_cut: int) -> Iterator[str]:
  if num_dropped:
    yield f'{num_dropped} prompts left out: longer than max_prompt_tokens'
  if num_cut:
    yield f'{num_cut} prompts cut to max_prompt_tokens'

# SPDX-License-Identifier: Apache-2.0
"""Chats as a workload: a model's own answers stand in its next prompts."""

from dataclasses import dataclass
from pathlib import Path

from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import Sampling
from mooncake_jax.workload.multi_turn import Sessions
from mooncake_jax.workload.session_file import load_sessions
from mooncake_jax.workload.session_file import Session
from scripts.gin_source import ROOT
from scripts.models import Model
from scripts.models import stop_token_ids
from scripts.models import Tokens
from scripts.workloads import Prepared


@dataclass(frozen=True)
class ChatWorkload:
  """Multi-turn chats from JSON lines (see `workload.session_file`).

  Attributes:
    path: of the file, as given or from the repository's root.
    max_output_tokens: of each answer.
    num_sessions: the first so many; None is all.
    sampling: how answers are drawn.
  """

  path: str
  max_output_tokens: int = 64
  num_sessions: int | None = None
  sampling: Sampling = Sampling()

  def prepare(
    self, model: Model, config: ModelConfig, cluster: ClusterSpec, tokens: bool
  ) -> Prepared:
    """Chats need answers, so they need devices: ValueError without them."""
    if not tokens:
      raise ValueError(
        f'ChatWorkload.path={self.path!r} needs Experiment.backend="device": '
        'a simulation gives no answers'
      )
    sessions, bad_lines = load_sessions(self._find())
    sessions = sessions[: self.num_sessions]
    tokenizer = model.load_tokenizer(config)
    chats = Sessions(
      sessions,
      encode_chat=tokenizer.encode_chat,
      decode=tokenizer.decode,
      block_size_tokens=cluster.block_size_tokens,
      max_output_tokens=self.max_output_tokens,
      max_tokens=cluster.max_request_tokens(config),
      identity=model.identity(),
      sampling=self.sampling,
      stop_token_ids=stop_token_ids(tokenizer),
    )
    requests = chats.initial()
    chats.errors[:0] = bad_lines
    return Prepared(
      requests,
      total=sum(len(session.turns) for session in sessions),
      follow_up=chats.follow_up,
      tell=Teller(sessions, tokenizer),
      errors=chats.errors,
    )

  def _find(self) -> Path:
    here = Path(self.path)
    return here if here.exists() else ROOT / here


class Teller:
  """Says what was asked and answered."""

  def __init__(self, sessions: list[Session], tokenizer: Tokens):
    self._tokenizer = tokenizer
    self._questions = {
      name: turn
      for session in sessions
      for name, turn in zip(session.request_ids, session.turns, strict=True)
    }

  def __call__(self, record: RequestRecord) -> str:
    question = self._questions[record.request_id].split('\n')[-1]
    answer = self._tokenizer.decode(record.output_tokens)
    return f'> {question}\n{answer.strip()}'

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
class Chats:
  """Chats to be had, and the bad lines met on the way."""

  sessions: list[Session]
  errors: list[str]


def from_file(path: str) -> Chats:
  """Chats as JSON lines (see `workload.session_file`).

  Args:
    path: as given or from the repository's root.
  """
  here = Path(path)
  return Chats(*load_sessions(here if here.exists() else ROOT / here))


def one(prompt: str) -> Chats:
  """A chat of a single turn.

  Raises:
    ValueError: the prompt is empty.
  """
  if not prompt.strip():
    raise ValueError(f'{prompt=} is empty')
  return Chats([Session('prompt', (prompt,))], [])


@dataclass(frozen=True)
class ChatWorkload:
  """Multi-turn chats.

  Attributes:
    chats: what users say.
    max_output_tokens: of each answer.
    num_sessions: the first so many; None is all.
    sampling: how answers are drawn.
  """

  chats: Chats
  max_output_tokens: int = 64
  num_sessions: int | None = None
  sampling: Sampling = Sampling()

  def prepare(
    self, model: Model, config: ModelConfig, cluster: ClusterSpec, tokens: bool
  ) -> Prepared:
    """Chats need answers, so they need devices: ValueError without them."""
    if not tokens:
      raise ValueError(
        'ChatWorkload needs Experiment.backend="device": a simulation gives no '
        'answers'
      )
    sessions = self.chats.sessions[: self.num_sessions]
    tokenizer = model.load_tokenizer(config)
    asked = Sessions(
      sessions,
      encode_chat=tokenizer.encode_chat,
      decode=tokenizer.decode,
      block_size_tokens=cluster.block_size_tokens,
      max_output_tokens=self.max_output_tokens,
      max_tokens=cluster.max_request_tokens(config),
      identity=model.identity(cluster.kv_dtype),
      sampling=self.sampling,
      stop_token_ids=stop_token_ids(tokenizer),
    )
    requests = asked.initial()
    asked.errors[:0] = self.chats.errors
    return Prepared(
      requests,
      total=sum(len(session.turns) for session in sessions),
      follow_up=asked.follow_up,
      tell=Teller(sessions, tokenizer),
      errors=asked.errors,
    )


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

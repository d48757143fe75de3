# SPDX-License-Identifier: Apache-2.0
"""What a server allows, so that no client costs it more than it can bear."""

from dataclasses import dataclass
from dataclasses import fields


@dataclass(frozen=True)
class GatewaySpec:
  """Limits and names of a server.

  Attributes:
    model_name: what clients call the model; '' is its folder's name.
    max_body_bytes: of a request.
    max_bodies_bytes: of all requests that are being read or made into tokens.
    max_choices: answers that one request may ask for, prompts times `n`.
    max_output_tokens: of one answer; None: as far as the context goes.
    max_open_choices: answers under way, of all requests; more are refused with
      429, so that whatever waits is bounded.
    max_connections: open at once.
    header_timeout_s: from a connection's opening, or a request's first byte, to
      the end of its headers.
    body_timeout_s: from there to the end of its body.
    write_timeout_s: a client that takes nothing for so long while there is
      something to send is cut off and its request cancelled.
    overdue_s: how much longer than the cluster's `request_timeout_s` a client
      waits: that comes first, unless the loop hangs.
    keep_alive_s: how long an idle connection stays open.
    drain_timeout_s: how long requests under way may take once the server is
      asked to stop.
    max_told: recent requests that are kept to be explained and shown.
  """

  model_name: str = ''
  max_body_bytes: int = 8 << 20
  max_bodies_bytes: int = 256 << 20
  max_choices: int = 64
  max_output_tokens: int | None = None
  max_open_choices: int = 1024
  max_connections: int = 4096
  header_timeout_s: float = 10.0
  body_timeout_s: float = 30.0
  write_timeout_s: float = 60.0
  overdue_s: float = 10.0
  keep_alive_s: float = 30.0
  drain_timeout_s: float = 600.0
  max_told: int = 512

  def __post_init__(self):
    for each in fields(self):
      value = getattr(self, each.name)
      if isinstance(value, int | float) and not value > 0:
        raise ValueError(f'GatewaySpec.{each.name}={value!r} must be > 0')

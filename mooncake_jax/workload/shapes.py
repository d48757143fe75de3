# SPDX-License-Identifier: Apache-2.0
"""What the generated workloads look like: numbers, and where they come from.

A workload is a mix of kinds of session. Lengths are drawn from quantile
tables at LEVELS, measured on the published traces (FAST'25 section 5.1,
Table 2: conversation 12,031 requests, 12,035 input and 343 output tokens on
average, 40 % cache ratio; tool & agent 23,608, 8,596, 182, 59 %; synthetic
3,993, 15,325, 149, 66 %). The tool & agent trace is known from these
averages and from a slice of the arXiv version's trace of the same service:
38 % of its requests share 12 blocks, 14 % share 5, the rest are chats.
"""

from bisect import bisect_right
from dataclasses import dataclass
import math

from mooncake_jax.workload.trace import TOKENS_PER_HASH_ID

LEVELS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class Quantiles:
  """A distribution by its values at LEVELS, log-linear in between."""

  values: tuple[float, ...]

  def __post_init__(self):
    if len(self.values) != len(LEVELS) or min(self.values) < 1:
      raise ValueError(
        f'Quantiles.values={self.values} must be {len(LEVELS)} numbers >= 1'
      )
    if list(self.values) != sorted(self.values):
      raise ValueError(f'Quantiles.values={self.values} must not fall')

  def at(self, level: float) -> int:
    """The value that a share `level` in [0, 1) lies below, rounded."""
    i = bisect_right(LEVELS, level) - 1
    low, high = math.log(self.values[i]), math.log(self.values[i + 1])
    share = (level - LEVELS[i]) / (LEVELS[i + 1] - LEVELS[i])
    return round(math.exp(low + share * (high - low)))


@dataclass(frozen=True)
class SessionKind:
  """Sessions of one kind; lengths are in tokens, blocks of 512.

  A session's first prompt is its shared prefix and new text. Each next one is
  the history (prompt and output so far) and new user text, or else a branch:
  it keeps only some of the last prompt's blocks, as when a tool's result or a
  pasted document replaces the rest. With `document` there is no history: every
  turn asks another question about the first prompt.

  Attributes:
    share: of the workload's *requests*.
    prefix: names the prefix all sessions of this name share.
    prefix_blocks: blocks of that prefix; block 0 is one for all prefixes.
    first: length of the first prompt, prefix included.
    user: new text of a later turn, or the question about a document.
    output: length of an answer.
    continues: probability of a 2nd turn, of a 3rd, ...; the last one stays.
    branches: probability that a later turn is a branch.
    branch_blocks, branch_text: what a branch keeps, and its new text.
    gap_s: seconds between the arrivals of two turns at the native rate.
  """

  share: float
  first: Quantiles
  output: Quantiles
  user: Quantiles | None = None
  continues: tuple[float, ...] = (0.0,)
  document: bool = False
  prefix: str = ''
  prefix_blocks: int = 0
  branches: float = 0.0
  branch_blocks: Quantiles | None = None
  branch_text: Quantiles | None = None
  gap_s: Quantiles | None = None

  def continues_after(self, turn: int) -> float:
    """Probability that turn `turn` (from 0) is followed by another."""
    return self.continues[min(turn, len(self.continues) - 1)]

  @property
  def least_tokens(self) -> int:
    """Of the shortest first prompt."""
    question = self.user.at(0.0) if self.document and self.user else 0
    prefix = self.prefix_blocks * TOKENS_PER_HASH_ID
    return max(self.first.at(0.0), prefix) + question

  @property
  def mean_turns(self) -> float:
    """Expected requests of a session."""
    total, alive = 1.0, 1.0
    for probability in self.continues[:-1]:
      alive *= probability
      total += alive
    last = self.continues[-1]
    return total + alive * last / (1 - last)


@dataclass(frozen=True)
class WorkloadShape:
  """A mix of session kinds at the rate it was recorded at.

  Attributes:
    requests_per_s: the native rate, to which `gap_s` belongs.
    max_prompt_tokens: a session ends before a longer prompt.

  Raises:
    ValueError: no first prompt of a kind is short enough.
  """

  kinds: tuple[SessionKind, ...]
  requests_per_s: float
  max_prompt_tokens: int

  def __post_init__(self):
    for i, kind in enumerate(self.kinds):
      if (least := kind.least_tokens) > self.max_prompt_tokens:
        raise ValueError(
          f'WorkloadShape.max_prompt_tokens={self.max_prompt_tokens} is less '
          f'than any first prompt of kinds[{i}], {least} at least'
        )


# fmt: off
_CHAT_FIRST = Quantiles(
  (891, 894, 897, 905, 1336, 5264, 13056, 25559, 38494, 89868, 126195))
_SHORTER_CHAT_FIRST = Quantiles(
  (891, 894, 897, 905, 1336, 5264, 13056, 24000, 32000, 60000, 100000))
_CHAT_USER = Quantiles((1, 1, 1, 1, 9, 26, 356, 4194, 6921, 14000, 60000))
_CHAT_OUTPUT = Quantiles((1, 3, 10, 24, 156, 350, 472, 597, 698, 1119, 2000))
_CHAT_GAP_S = Quantiles((1, 12, 30, 42, 66, 123, 264, 483, 615, 1477, 3030))
_BRANCH_BLOCKS = Quantiles((2, 2, 2, 2, 3, 6, 14, 27, 46, 145, 145))
_BRANCH_TEXT = Quantiles(
  (10, 422, 896, 1773, 5790, 9567, 14831, 19891, 26341, 39348, 94968))

_DOCUMENT = Quantiles(
  (2507, 2668, 3010, 3972, 11259, 18038, 32050, 42726, 54298, 66766, 191000))
_QUESTION = Quantiles((5, 15, 20, 30, 50, 80, 150, 300, 500, 900, 1500))
_DOCUMENT_OUTPUT = Quantiles((1, 2, 2, 3, 7, 24, 119, 276, 347, 499, 893))
_DOCUMENT_GAP_S = Quantiles((1, 1, 1, 2, 20, 65, 164, 294, 405, 608, 793))
_SHORT_FIRST = Quantiles((13, 13, 17, 19, 24, 40, 130, 500, 900, 1600, 2486))
_SHORT_USER = Quantiles((1, 3, 6, 9, 16, 30, 70, 200, 400, 900, 1500))
_SHORT_OUTPUT = Quantiles((1, 3, 9, 28, 112, 252, 386, 581, 715, 787, 842))
# fmt: on

CONVERSATION = WorkloadShape(
  kinds=(
    SessionKind(
      share=1.0,
      prefix='system',
      prefix_blocks=1,
      first=_CHAT_FIRST,
      user=_CHAT_USER,
      output=_CHAT_OUTPUT,
      continues=(0.31, 0.42, 0.51, 0.59, 0.62, 0.68),
      branches=0.15,
      branch_blocks=_BRANCH_BLOCKS,
      branch_text=_BRANCH_TEXT,
      gap_s=_CHAT_GAP_S,
    ),
  ),
  requests_per_s=3.4,
  max_prompt_tokens=126_195,
)

TOOL_AGENT = WorkloadShape(
  kinds=(
    SessionKind(
      share=0.38,
      prefix='tool',
      prefix_blocks=12,
      first=Quantiles(
        (6145, 6160, 6200, 6250, 6400, 6700, 7200, 7700, 7900, 8100, 8200)
      ),
      output=Quantiles((3, 4, 6, 9, 15, 25, 40, 55, 65, 75, 80)),
    ),
    SessionKind(
      share=0.14,
      prefix='agent',
      prefix_blocks=5,
      first=Quantiles(
        (3000, 3010, 3030, 3060, 3120, 3220, 3330, 3420, 3460, 3490, 3500)
      ),
      output=Quantiles((16, 16, 17, 17, 18, 20, 22, 23, 23, 24, 24)),
    ),
    SessionKind(
      share=0.48,
      prefix='system',
      prefix_blocks=1,
      first=_SHORTER_CHAT_FIRST,
      user=_CHAT_USER,
      output=_CHAT_OUTPUT,
      continues=(0.31, 0.42, 0.51, 0.59, 0.62, 0.68),
      gap_s=_CHAT_GAP_S,
    ),
  ),
  requests_per_s=6.6,
  max_prompt_tokens=126_195,
)

SYNTHETIC = WorkloadShape(
  kinds=(
    SessionKind(  # ShareGPT-like
      share=0.33,
      first=_SHORT_FIRST,
      user=_SHORT_USER,
      output=_SHORT_OUTPUT,
      continues=(0.2, 0.35),
      gap_s=_DOCUMENT_GAP_S,
    ),
    SessionKind(  # L-Eval and LooGLE: half of the documents are asked once
      share=0.67,
      document=True,
      first=_DOCUMENT,
      user=_QUESTION,
      output=_DOCUMENT_OUTPUT,
      continues=(0.475, 0.76),
      gap_s=_DOCUMENT_GAP_S,
    ),
  ),
  requests_per_s=3.91,
  max_prompt_tokens=191_378,
)

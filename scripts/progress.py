# SPDX-License-Identifier: Apache-2.0
"""A progress bar over the events of a run."""

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn
from rich.progress import MofNCompleteColumn
from rich.progress import Progress
from rich.progress import TextColumn
from rich.progress import TimeElapsedColumn

from mooncake_jax.events import ENDS
from mooncake_jax.events import Event


@contextmanager
def progress(
  label: str, total: int, done: int = 0
) -> Iterator[Callable[[Event], None]]:
  """Gives the callback for `serve(on_event=)`; counts requests that ended.

  Args:
    done: so many had ended before.
  """
  # As text in a notebook too, where it goes wherever stdout does.
  bar = Progress(
    TextColumn('{task.description}'),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    console=Console(force_jupyter=False),
  )
  with bar:
    task = bar.add_task(label, total=total, completed=done)

    def on_event(event: Event) -> None:
      if isinstance(event, ENDS):
        bar.advance(task)

    yield on_event

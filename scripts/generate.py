# SPDX-License-Identifier: Apache-2.0
"""Generates from one prompt through the whole disaggregated engine.

  python scripts/generate.py 'Why is the sky blue?' [--max-tokens 64]

The cluster is that of configs/run/generate.gin, which `--bind` changes:
--bind 'Sampling.temperature=0.8' --bind 'Sampling.seed=1'.
"""

import argparse
import sys

from scripts.config import load
from scripts.errors import one_line_errors
from scripts.experiment import Experiment
from scripts.serving import backends
from scripts.serving import prepare
from scripts.serving import serve_once

CONFIG = 'configs/run/generate.gin'


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('prompt', help='what the user says')
  parser.add_argument('--max-tokens', type=int, default=64)
  parser.add_argument('--bind', action='append', default=[], metavar='X.y=z')
  args = parser.parse_args(argv)
  bindings = [
    f'one.prompt = {args.prompt!r}',
    f'ChatWorkload.max_output_tokens = {args.max_tokens}',
    *args.bind,
  ]
  with one_line_errors():
    experiment, _ = load(CONFIG, bindings, Experiment)
    print(generate(experiment))
  return 0


def generate(experiment: Experiment) -> str:
  """The prompt and its answer.

  Raises:
    ValueError: the prompt can't be served, as when it is too long.
  """
  config = experiment.model.read_config()
  prepared = prepare(experiment, config)
  if prepared.errors:
    raise ValueError(prepared.errors[0])
  with backends(experiment, config) as make_backend:
    outcome = serve_once(experiment, config, prepared, make_backend())
  (record,) = outcome.records
  if record.outcome != 'completed':
    raise ValueError(f'{record.outcome}: {record.reason}')
  assert prepared.tell is not None
  return prepared.tell(record)


if __name__ == '__main__':
  sys.exit(main())

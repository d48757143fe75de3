# SPDX-License-Identifier: Apache-2.0
"""All experiments by name, and the page's first paragraphs."""

from scripts.reproduction.admission import admission
from scripts.reproduction.admission import oscillation
from scripts.reproduction.arxiv import arxiv
from scripts.reproduction.blind import bandwidth
from scripts.reproduction.blind import split
from scripts.reproduction.breakdown import breakdown
from scripts.reproduction.capacity import capacity
from scripts.reproduction.capacity import prefill_time
from scripts.reproduction.causes import chunk_cause
from scripts.reproduction.causes import load_cause
from scripts.reproduction.evictions import evictions
from scripts.reproduction.hits import hits
from scripts.reproduction.hot_keys import replica_counts
from scripts.reproduction.page import Experiment
from scripts.reproduction.policies import policies
from scripts.reproduction.pooling import pooling

EXPERIMENTS: dict[str, Experiment] = {
  'breakdown': breakdown,
  'policies': policies,
  'capacity': capacity,
  'prefill': prefill_time,
  'load': load_cause,
  'chunks': chunk_cause,
  'hits': hits,
  'evictions': evictions,
  'pooling': pooling,
  'replicas': replica_counts,
  'arxiv': arxiv,
  'admission': admission,
  'oscillation': oscillation,
  'bandwidth': bandwidth,
  'split': split,
}

HEAD = """# The papers' experiments, simulated

Written by `scripts/reproduce.py`. Each run is this project's own Conductor,
store and instances on the simulator. **One calibration** (the latency
breakdown, below) and **one set of rules** for all: nothing is tuned for a
figure. FAST is FAST'25, arXiv is 2407.00079; where a number of theirs is read
off a plot it is good to about 1 % of the axis. The conversation and the
synthetic trace are the published ones; tool & agent and arXiv traces are not
public here, so what stands for them is generated, and only the order is asked
for."""

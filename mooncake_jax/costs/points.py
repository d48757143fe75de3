# SPDX-License-Identifier: Apache-2.0
"""Measured or published times as a CSV file, to fit costs to.

  kind,model,system,backend,ver,tp,isl,prefix,bs,ms,note,num_bytes
  prefill,meta-llama/Meta-Llama-3.1-70B,h200_sxm,vllm,0.24,8,16384,8192,1,366,,
  decode,meta-llama/Meta-Llama-3.1-70B,h200_sxm,vllm,0.24,8,4096,0,32,10.5,,
  copy,meta-llama/Meta-Llama-3.1-70B,h200_sxm,vllm,0.24,8,0,0,1,12,,1000000000

As aiconfigurator prints them: a prefill of prompt tokens [prefix, isl) in one
pass, a decode step of bs rows with isl tokens each. `num_bytes` is of a
transfer over the link that `kind` names; the column may be missing. A note
says why a point does not count (it would not fit in memory).
"""

import csv
from pathlib import Path
from typing import get_args
from typing import NamedTuple

from mooncake_jax.costs.fit import DecodeSample
from mooncake_jax.costs.fit import LinkSample
from mooncake_jax.costs.fit import PrefillSample
from mooncake_jax.costs.model import Link
from mooncake_jax.costs.model import LINKS
from mooncake_jax.workload.csv_lines import Fields
from mooncake_jax.workload.csv_lines import number_in
from mooncake_jax.workload.csv_lines import read_csv
from mooncake_jax.workload.csv_lines import whole_in

HEADER = tuple(
  'kind model system backend ver tp isl prefix bs ms note num_bytes'.split()
)
COLUMNS = tuple('kind model system backend tp isl prefix bs ms note'.split())


class Lane(NamedTuple):
  """What the points of one fit have in common."""

  system: str
  model: str
  tensor_parallel: int
  backend: str


class Points(NamedTuple):
  """The samples of a lane, in the file's order."""

  prefill: list[PrefillSample]
  decode: list[DecodeSample]
  links: dict[Link, list[LinkSample]]


def load_points(path: str | Path) -> dict[Lane, Points]:
  """Reads all points that count.

  Raises:
    ValueError: one line that names file, line, field and value of the first
      bad one: costs that leave out what they can't read would be wrong costs.
    OSError: the file can't be opened.
  """
  rows, errors = read_csv(path, COLUMNS, _point)
  if errors:
    raise ValueError(errors[0])
  lanes: dict[Lane, Points] = {}
  for lane, kind, sample in (row for row in rows if row):
    points = lanes.setdefault(lane, Points([], [], {}))
    if isinstance(sample, PrefillSample):
      points.prefill.append(sample)
    elif isinstance(sample, DecodeSample):
      points.decode.append(sample)
    else:
      points.links.setdefault(kind, []).append(sample)
  return lanes


def write_points(path: str | Path, lane: Lane, points: Points) -> None:
  """Writes what `load_points` reads.

  A step's context is spread evenly over its rows, in whole tokens: 100 of 3
  rows are read as 99.
  """
  system, model, tensor_parallel, backend = lane
  common = (model, system, backend, '', tensor_parallel)
  with open(path, 'w', encoding='utf-8', newline='') as file:
    table = csv.writer(file, lineterminator='\n')
    table.writerow(HEADER)
    for chunk, prefix, seconds in points.prefill:
      row = (chunk + prefix, prefix, 1, seconds * 1000, '', '')
      table.writerow(('prefill', *common, *row))
    for rows, context, seconds in points.decode:
      row = (context // rows, 0, rows, seconds * 1000, '', '')
      table.writerow(('decode', *common, *row))
    for link, samples in points.links.items():
      for num_bytes, seconds in samples:
        row = (0, 0, 1, seconds * 1000, '', num_bytes)
        table.writerow((link, *common, *row))


def _point(
  fields: Fields, where: str
) -> tuple[Lane, Link, PrefillSample | DecodeSample | LinkSample] | None:
  if fields['note']:
    return None
  lane = Lane(
    fields['system'],
    fields['model'],
    whole_in(fields, 'tp', where, 1),
    fields['backend'],
  )
  seconds = number_in(fields, 'ms', where) / 1000
  if not seconds:
    raise ValueError(f'{where}: ms={fields["ms"]!r} must be > 0')
  return lane, fields['kind'], _sample(fields, seconds, where)  # pyright: ignore


def _sample(
  fields: Fields, seconds: float, where: str
) -> PrefillSample | DecodeSample | LinkSample:
  kind = fields['kind']
  if kind in LINKS:
    if 'num_bytes' not in fields:
      raise ValueError(f'{where}: kind={kind!r} needs the column num_bytes')
    return LinkSample(whole_in(fields, 'num_bytes', where, 1, 2**53), seconds)
  tokens = whole_in(fields, 'isl', where, 1)
  rows = whole_in(fields, 'bs', where, 1)
  if kind == 'decode':
    return DecodeSample(rows, rows * tokens, seconds)
  if kind != 'prefill':
    known = ('prefill', 'decode', *get_args(Link))
    raise ValueError(f'{where}: kind={kind!r} must be one of {known}')
  prefix = whole_in(fields, 'prefix', where)
  if prefix >= tokens or rows != 1:
    raise ValueError(
      f'{where}: {prefix=} must be below isl={tokens}, and bs={rows} be 1'
    )
  return PrefillSample(tokens - prefix, prefix, seconds)

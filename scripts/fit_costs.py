# SPDX-License-Identifier: Apache-2.0
"""Fits cost models to published times, and tells how far off they are.

  python scripts/fit_costs.py POINTS.csv [--system h200_sxm] [--backend vllm]
  python scripts/fit_costs.py POINTS.csv --backend trtllm --tp 8 --write \\
    --source 'who measured this, and when'

For the file's format see `costs/points.py`. The table has the errors at the
half of the points that a fit to the other half has not seen; what is written
is fitted to all points. This machine is measured by scripts/calibrate.py.
"""

import argparse
from collections.abc import Mapping
from dataclasses import fields
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
import sys

import numpy as np

from mooncake_jax.costs import fit
from mooncake_jax.costs.fit_roofline import fit_roofline
from mooncake_jax.costs.fit_roofline import Sheet
from mooncake_jax.costs.model import Link
from mooncake_jax.costs.points import Lane
from mooncake_jax.costs.points import load_points
from mooncake_jax.costs.points import Points
from mooncake_jax.costs.roofline import RooflineCost
from mooncake_jax.model_config import ModelConfig
from scripts.config import load
from scripts.errors import one_line_errors
from scripts.experiment import Experiment
from scripts.gin_source import read
from scripts.gin_source import ROOT
from scripts.gin_source import Source

HARDWARE = Path('configs/hardware')
# Where points say nothing of links.
LINKS_OF = {
  'a100_sxm': 'links_pcie4_4x200g.gin',
  'h100_sxm': 'links_pcie5_8x400g.gin',
  'h200_sxm': 'links_pcie5_8x400g.gin',
  'b200_sxm': 'links_pcie5_8x400g.gin',
}
# A link without points takes what another does.
LIKE: dict[Link, Link] = {'handoff': 'copy', 'offload': 'onload'}

# Data sheets, bf16.
SHEETS = {
  'a100_sxm': Sheet(312e12, 2.039e12),
  'h100_sxm': Sheet(989e12, 3.35e12),
  'h200_sxm': Sheet(989e12, 4.8e12),
  'b200_sxm': Sheet(2250e12, 8e12),
}
ROOFLINE = """\
# {tp} {system} as one instance, for any model in bf16: its data
# sheet with the shares of the peaks that {backend} reaches, fitted
# {date} to {model}:
# {source}.
# Mean error there, of a fit to every other point at those between:
# prefill {prefill_error:.1%}, decode {decode_error:.1%}. Links as in
# {links}.
#
#   python scripts/fit_costs.py {points} \\
#     --system {system} --backend {backend} --tp {tp} --write --roofline
from __gin__ import dynamic_registration
import mooncake_jax.costs.roofline as roofline
import mooncake_jax.model_config as model_config
import scripts.experiment as experiment

experiment.Experiment.costs = @roofline.RooflineCost()
roofline.RooflineCost.config = @model_config.ModelConfig()
{bindings}
"""
TEMPLATE = """\
# {model} on {tp} {system} as one instance,
# as {backend} runs it.
# Fitted {date} to {prefill} prefill and {decode} decode points of
# {source}.
# Mean error, of a fit to every other point at those between: prefill
# {prefill_error:.1%}, decode {decode_error:.1%}.
#
#   python scripts/fit_costs.py {points} \\
#     --system {system} --backend {backend} --tp {tp} --write
from __gin__ import dynamic_registration
import mooncake_jax.costs.model as costs
import scripts.experiment as experiment
{include}
experiment.Experiment.costs = @costs.PolynomialCost()
{bindings}
"""


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  add = parser.add_argument
  add('points', type=Path, help='a CSV file')
  add('--system', help='only this one')
  add('--backend', help='only this one')
  add('--tp', type=int, help='only this tensor parallelism')
  add('--write', action='store_true', help=f'a gin file a lane in {HARDWARE}')
  add(
    '--roofline',
    action='store_true',
    help='write shares of the peaks, for any model, not polynomials',
  )
  add('--source', help='of the points, for the heads of what is written')
  args = parser.parse_args(argv)
  with one_line_errors():
    lanes = _chosen(load_points(args.points), args)
    print(table(lanes))
    for lane, points in lanes.items() if args.write else ():
      if args.roofline and _fp8(lane):
        continue  # `SHEETS` are for bf16.
      to_text = roofline_gin if args.roofline else to_gin
      name = roofline_name(lane) if args.roofline else file_name(lane)
      path = ROOT / HARDWARE / f'{name}.gin'
      path.write_text(to_text(lane, points, _shown(args.points), args.source))
      print(path)
  return 0


def table(lanes: Mapping[Lane, Points]) -> str:
  """Held-out errors of each lane, mean and largest, and over all points."""
  rows: list[tuple[str, ...]] = [
    ('', 'prefill', 'largest', 'decode', 'largest')
  ]
  all_prefill, all_decode = [], []
  for lane, points in lanes.items():
    prefill, decode = held_out(points)
    rows.append((name(lane), *_figures(prefill), *_figures(decode)))
    all_prefill.append(prefill)
    all_decode.append(decode)
  total = (*_figures(np.hstack(all_prefill)), *_figures(np.hstack(all_decode)))
  rows.append(('all points', *total))
  return '\n'.join(
    f'{first:36}' + ''.join(f'{cell:>9}' for cell in cells)
    for first, *cells in rows
  )


def held_out(points: Points) -> tuple[np.ndarray, np.ndarray]:
  """Relative errors of prefill and of decode, see `fit.held_out_errors`."""
  return (
    fit.held_out_errors(fit.PREFILL, points.prefill),
    fit.held_out_errors(fit.DECODE, points.decode),
  )


def name(lane: Lane) -> str:
  return (
    f'{lane.system} x{lane.tensor_parallel} '
    f'{"fp8" if _fp8(lane) else "bf16"} {lane.backend}'
  )


def file_name(lane: Lane) -> str:
  """'h200_x8_llama70b', 'h200_x8_llama70b_fp8'."""
  system = lane.system.removesuffix('_sxm')
  dtype = '_fp8' if _fp8(lane) else ''
  return f'{system}_x{lane.tensor_parallel}_llama70b{dtype}'


def to_gin(lane: Lane, points: Points, file: str, source: str | None) -> str:
  fits = _fits(points)
  prefill, decode = held_out(points)
  include = ''
  if not points.links:
    include = f"\ninclude '{HARDWARE / LINKS_OF[lane.system]}'\n"
  return TEMPLATE.format(
    model=lane.model,
    system=lane.system,
    tp=lane.tensor_parallel,
    backend=lane.backend,
    date=date.today().isoformat(),
    prefill=len(points.prefill),
    decode=len(points.decode),
    source=source or file,
    prefill_error=np.abs(prefill).mean(),
    decode_error=np.abs(decode).mean(),
    points=file,
    include=include,
    bindings='\n'.join(
      f'costs.PolynomialCost.{coefficient} = {value:.4g}'
      for found in fits
      for coefficient, value in found.coefficients.items()
    ),
  )


def roofline_of(lane: Lane, points: Points) -> RooflineCost:
  """Fitted to the points; links as fast as those of its nodes."""
  sheet, config = SHEETS[lane.system], llama_70b()
  rates = _link_rates(LINKS_OF[lane.system])
  base = RooflineCost(
    config,
    sheet.peak_flops_per_s,
    sheet.hbm_bytes_per_s,
    num_devices=lane.tensor_parallel,
    onload_bytes_per_s=rates['onload'],
    offload_bytes_per_s=rates['offload'],
    copy_bytes_per_s=rates['copy'],
    handoff_bytes_per_s=rates['handoff'],
  )
  shares = fit_roofline(config, sheet, lane.tensor_parallel, points)
  return replace(base, **shares)


@cache
def _link_rates(file: str) -> dict[str, float]:
  """Bytes a second by link, of a file of links."""
  source = Source()
  read(HARDWARE / file, source)
  bound = {binding.parameter: binding.value for binding in source.bindings}
  links = ('onload', 'offload', 'copy', 'handoff')
  return {link: bound[f'{link}_bytes_per_s'] for link in links}


def roofline_held_out(
  lane: Lane, points: Points
) -> tuple[np.ndarray, np.ndarray]:
  """As `held_out`, of the cost model itself."""
  half = Points(points.prefill[::2], points.decode[::2], {})
  costs = roofline_of(lane, half)
  return (
    np.array(
      [costs.prefill_s(x, L) / s - 1 for x, L, s in points.prefill[1::2]]
    ),
    np.array(
      [costs.decode_step_s(b, c) / s - 1 for b, c, s in points.decode[1::2]]
    ),
  )


def roofline_name(lane: Lane) -> str:
  """'h200_x8'."""
  return f'{lane.system.removesuffix("_sxm")}_x{lane.tensor_parallel}'


def roofline_gin(
  lane: Lane, points: Points, file: str, source: str | None
) -> str:
  prefill, decode = roofline_held_out(lane, points)
  costs = roofline_of(lane, points)
  return ROOFLINE.format(
    model=lane.model,
    system=lane.system,
    tp=lane.tensor_parallel,
    backend=lane.backend,
    date=date.today().isoformat(),
    source=source or file,
    prefill_error=np.abs(prefill).mean(),
    decode_error=np.abs(decode).mean(),
    points=file,
    links=LINKS_OF[lane.system],
    bindings='\n'.join(
      f'roofline.RooflineCost.{field.name} = {value:.4g}'
      for field in fields(RooflineCost)
      if field.name != 'config'
      and (value := getattr(costs, field.name)) != field.default
    ),
  )


@cache
def llama_70b() -> ModelConfig:
  """The shape whose times the points are."""
  run, _ = load('configs/run/sim_conversation.gin', (), Experiment)
  return run.model.read_config()


def _fits(points: Points) -> list[fit.Fit]:
  fits = [fit.fit_prefill(points.prefill), fit.fit_decode(points.decode)]
  links = points.links
  for link in (*links, *LIKE):
    like = links.get(link) or links.get(LIKE.get(link, link))
    if like:
      fits.append(fit.fit_link(like, link))
  return fits


def _chosen(
  lanes: Mapping[Lane, Points], args: argparse.Namespace
) -> dict[Lane, Points]:
  chosen = {
    lane: points
    for lane, points in lanes.items()
    if args.system in (None, lane.system)
    and args.backend in (None, lane.backend)
    and args.tp in (None, lane.tensor_parallel)
  }
  if not chosen:
    raise ValueError(
      f'{args.points}: none of {len(lanes)} lanes has system={args.system} '
      f'backend={args.backend} tp={args.tp}'
    )
  return chosen


def _figures(errors: np.ndarray) -> tuple[str, str]:
  sizes = np.abs(errors)
  return f'{sizes.mean():.1%}', f'{sizes.max():.0%}'


def _shown(path: Path) -> str:
  """From the repository's root, or its name alone."""
  path = path.resolve()
  inside = path.is_relative_to(ROOT)
  return str(path.relative_to(ROOT)) if inside else path.name


def _fp8(lane: Lane) -> bool:
  return 'fp8' in lane.model.lower()


if __name__ == '__main__':
  sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Names of segments: whose memory it is, and of which medium.

An instance's pinned host memory bears its name, 'prefill0'; its SSD is
'prefill0/ssd', and what stays in its devices' memory 'prefill0/device'. The
real Mooncake Store, which no instance owns, is 'mooncake'. 'decode0/wire' is
the way into another process: what is put there arrives at decode0.
"""

from functools import cache
from typing import get_args
from typing import Literal

Medium = Literal['device', 'host', 'ssd', 'remote']
# Fastest first: readers take the first that has the block.
MEDIA: tuple[Medium, ...] = get_args(Medium)
REMOTE = 'mooncake'
WIRE = '/wire'
ARRIVALS = 'arrivals'  # what other processes send is read from there


def ssd_segment(instance: str) -> str:
  return f'{instance}/ssd'


def device_segment(instance: str) -> str:
  return f'{instance}/device'


def wire_segment(instance: str) -> str:
  return instance + WIRE


@cache
def owner(segment: str) -> str:
  """The instance whose memory it is; the remote store owns itself."""
  return segment.partition('/')[0]


def is_near(segment: str, instance: str) -> bool:
  """Whether an instance may read there unasked: its own, and the store's."""
  return owner(segment) in (instance, REMOTE)


@cache
def medium(segment: str) -> Medium:
  if segment == REMOTE:
    return 'remote'
  _, _, suffix = segment.partition('/')
  match suffix:
    case '':
      return 'host'
    case 'ssd':
      return 'ssd'
    case 'device':
      return 'device'
    case 'wire':
      return 'remote'
  raise ValueError(f'{segment=} is of no known medium')

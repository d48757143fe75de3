# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, and chats to text.

The splitting and merging is `tokenizers`' (`tokenizer.json`); the chat
template is the model's own Jinja text, run in a sandbox.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from datetime import datetime
import functools
import json
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import sandbox
import tokenizers

from mooncake_jax.model.checkpoints import gguf_config
from mooncake_jax.model.checkpoints import gguf_tokenizer
from mooncake_jax.model.checkpoints.gguf_file import GGUFFile
from mooncake_jax.model.token_bytes import TokenBytes

Message = Mapping[str, Any]


class Tokenizer:
  """A model's tokenizer with its chat template and end tokens.

  Attributes:
    name: the folder or file it came from; errors name it.
    bos_token, eos_token: text of the tokens, None where the model has none.
    eos_token_ids: any of these ends an answer.
    chat_template: Jinja text, None where the model has none.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    *,
    name: str = 'tokenizer',
    bos_token: str | None = None,
    eos_token: str | None = None,
    eos_token_ids: Sequence[int] = (),
    chat_template: str | None = None,
  ):
    self._backend = backend
    self.name = name
    self.bos_token = bos_token
    self.eos_token = eos_token
    self.eos_token_ids = tuple(eos_token_ids)
    self.chat_template = chat_template
    self._bytes = TokenBytes(backend)

  @classmethod
  def from_folder(cls, path: str | Path) -> 'Tokenizer':
    """Reads tokenizer.json and, where they are there, its companions.

    These are tokenizer_config.json (bos, eos, chat_template),
    chat_template.jinja, generation_config.json and config.json (eos ids).

    Raises:
      FileNotFoundError: there is no tokenizer.json.
      ValueError: a file does not parse; names it.
    """
    folder = Path(path)
    backend = _read_backend(folder / 'tokenizer.json')
    config = _read_json(folder / 'tokenizer_config.json')
    eos_token = _text(config.get('eos_token'))
    return cls(
      backend,
      name=str(folder),
      bos_token=_text(config.get('bos_token')),
      eos_token=eos_token,
      eos_token_ids=_eos_ids(folder, backend, eos_token),
      chat_template=_template(folder, config),
    )

  @classmethod
  def from_gguf(cls, path: str | Path | GGUFFile) -> 'Tokenizer':
    """Builds the tokenizer from a GGUF file's metadata.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: not a GGUF, or a vocabulary that is not known here.
    """
    file = path if isinstance(path, GGUFFile) else GGUFFile(path)
    return cls(
      gguf_tokenizer.build(file),
      name=file.path,
      bos_token=gguf_tokenizer.token(file, 'bos'),
      eos_token=gguf_tokenizer.token(file, 'eos'),
      eos_token_ids=gguf_config.eos_token_ids(file),
      chat_template=file.get('tokenizer.chat_template'),
    )

  @property
  def vocab_size(self) -> int:
    """Number of ids, added tokens included."""
    return self._backend.get_vocab_size()

  @property
  def bos_token_id(self) -> int | None:
    """Id of `bos_token`."""
    return None if self.bos_token is None else self.token_id(self.bos_token)

  def token_id(self, token: str) -> int | None:
    """Id of one token's text, None where the vocabulary lacks it."""
    return self._backend.token_to_id(token)

  def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of `text`.

    Args:
      text: special tokens in it (`<|im_end|>`) become their ids.
      add_special_tokens: put in front what the model's tokenizer puts there
        (Llama: bos). False for text from `apply_chat_template`.
    """
    # As a batch of one: `encode` would stop all other threads meanwhile.
    (encoded,) = self._backend.encode_batch_fast(
      [text], add_special_tokens=add_special_tokens
    )
    return encoded.ids

  def decode(
    self, ids: Iterable[int], *, skip_special_tokens: bool = True
  ) -> str:
    """Text of token ids; bytes that are no UTF-8 come out as U+FFFD."""
    return self._backend.decode(
      [int(i) for i in ids], skip_special_tokens=skip_special_tokens
    )

  def token_bytes(self, token: int) -> bytes:
    """Of one token, which may end within a character; see `TokenBytes`."""
    return self._bytes.of(token)

  def apply_chat_template(
    self,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    **variables: Any,
  ) -> str:
    """The text a chat becomes, to be encoded without special tokens.

    Args:
      messages: `{'role': 'user', 'content': '...'}`, oldest first.
      add_generation_prompt: end with the opening of the assistant's turn.
      variables: what else the template reads (`tools`, `enable_thinking`).

    Raises:
      ValueError: the model has no template, or its template refuses the
        messages (roles that do not alternate, say).
    """
    if self.chat_template is None:
      raise ValueError(f'{self.name}: chat_template=None, no chat format')
    try:
      return _compiled(self.chat_template).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=self.bos_token or '',
        eos_token=self.eos_token or '',
        **variables,
      )
    except jinja2.TemplateError as error:
      raise ValueError(f'{self.name}: chat_template: {error}') from error

  def encode_chat(
    self, messages: Sequence[Message], add_generation_prompt: bool = True
  ) -> list[int]:
    """Token ids of a chat."""
    text = self.apply_chat_template(messages, add_generation_prompt)
    return self.encode(text, add_special_tokens=False)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
  if not path.is_file():
    raise FileNotFoundError(f'{path}: no such file, cannot tokenize')
  try:
    return tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # the library raises bare Exception
    raise ValueError(f'{path}: not a tokenizer.json: {error}') from error


def _read_json(path: Path) -> dict[str, Any]:
  """The object in `path`, empty where there is no such file."""
  if not path.is_file():
    return {}
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path}: not JSON: {error}') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path}: not a JSON object')
  return value


def _text(token: Any) -> str | None:
  """Of a token given as a string or as {'content': '...', ...}."""
  return token['content'] if isinstance(token, Mapping) else token


def _eos_ids(
  folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
  """From the first that says: generation_config, config, tokenizer."""
  for name in ('generation_config.json', 'config.json'):
    ids = _read_json(folder / name).get('eos_token_id')
    if ids is not None:
      return tuple(ids) if isinstance(ids, list) else (ids,)
  index = None if eos_token is None else backend.token_to_id(eos_token)
  return () if index is None else (index,)


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
  path = folder / 'chat_template.jinja'
  if path.is_file():
    return path.read_text(encoding='utf-8')
  template = config.get('chat_template')
  if isinstance(template, list):  # several, each with a name
    named = {entry['name']: entry['template'] for entry in template}
    return named.get('default')
  return template


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
  """`template` in a sandbox that cannot change what it is given."""
  env = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=['jinja2.ext.loopcontrols'],
  )
  env.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  env.globals['raise_exception'] = _raise_exception
  env.globals['strftime_now'] = lambda form: datetime.now().strftime(form)
  return env.from_string(template)


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)

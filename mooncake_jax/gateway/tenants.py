# SPDX-License-Identifier: Apache-2.0
"""API keys, whose they are, and how much each tenant may ask for."""

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
import hashlib
import hmac
import json
from pathlib import Path
import time
from typing import Any

from mooncake_jax.gateway.errors import ApiError
from mooncake_jax.gateway.errors import too_many

LEAST_KEY_CHARS = 16


@dataclass(frozen=True)
class Tenant:
  """Whose requests share a cache and a quota.

  Attributes:
    name: unique.
    salt: of its block keys, so that it never hits what another computed.
    max_open: answers under way at once; None: the server's limit only.
    tokens_per_minute: prompt and output together; None: no limit.
    is_operator: may look at the whole server and at all requests.
  """

  name: str
  salt: str
  max_open: int | None = None
  tokens_per_minute: int | None = None
  is_operator: bool = False

  def __post_init__(self):
    for name in ('max_open', 'tokens_per_minute'):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise ValueError(f'tenant {self.name!r}: {name}={value!r} must be > 0')
    # From a file they may be anything, and "false" would be true.
    for name, kind in (('salt', str), ('is_operator', bool)):
      if not isinstance(value := getattr(self, name), kind):
        raise ValueError(
          f'tenant {self.name!r}: {name}={value!r} must be a {kind.__name__}'
        )


# Who asks where no keys are set.
ANYBODY = Tenant('', '', is_operator=True)


class Quota:
  """What one tenant has under way, and a bucket of tokens that refills."""

  def __init__(self, tenant: Tenant, clock: Callable[[], float]):
    self.tenant = tenant
    self.num_open = 0
    self._clock = clock
    self._tokens = float(tenant.tokens_per_minute or 0)
    self._filled_s = clock()

  def open(self, num_choices: int, num_tokens: int) -> None:
    """Takes in answers, with the most tokens they may come to.

    Raises:
      ApiError: 429.
    """
    most, rate = self.tenant.max_open, self.tenant.tokens_per_minute
    if most is not None and self.num_open + num_choices > most:
      raise too_many(
        f'At most {most} answers at once for you.', 'quota_open', 1.0
      )
    if rate is not None:
      self._fill(rate)
      lacking = num_tokens - self._tokens
      if lacking > 0:
        never = num_tokens > rate
        after_s = None if never else lacking / rate * 60
        raise too_many(
          f'At most {rate} tokens a minute for you.', 'quota_tokens', after_s
        )
      self._tokens -= num_tokens
    self.num_open += num_choices

  def close(self, num_choices: int, unused_tokens: int) -> None:
    """They ended, with fewer tokens than they might have had."""
    self.num_open -= num_choices
    if (rate := self.tenant.tokens_per_minute) is not None:
      self._tokens = min(self._tokens + unused_tokens, rate)

  def _fill(self, rate: int) -> None:
    now_s = self._clock()
    self._tokens += (now_s - self._filled_s) * rate / 60
    self._tokens, self._filled_s = min(self._tokens, rate), now_s


class Tenants:
  """Who may ask; anybody where there are no keys."""

  def __init__(
    self,
    keys: Sequence[tuple[str, Tenant]] = (),
    clock: Callable[[], float] = time.monotonic,
  ):
    """Each key with whose it is; a tenant may have several.

    Raises:
      ValueError: a key that is short or given twice, or two tenants of a name
        or with one salt, who would share a cache.
    """
    digests = [_digest(key) for key, _ in keys]
    if any(len(key) < LEAST_KEY_CHARS for key, _ in keys):
      raise ValueError(f'an API key has fewer than {LEAST_KEY_CHARS} letters')
    if len({*digests}) < len(digests):
      raise ValueError('an API key is given twice')
    tenants = {tenant for _, tenant in keys}
    if len({tenant.name for tenant in tenants}) < len(tenants):
      raise ValueError('two tenants have the same name')
    if len({tenant.salt for tenant in tenants}) < len(tenants):
      raise ValueError('two tenants have the same salt')
    quotas = {tenant.name: Quota(tenant, clock) for tenant in tenants}
    self._keys = [
      (digest, quotas[tenant.name])
      for digest, (_, tenant) in zip(digests, keys, strict=True)
    ]
    self._anybody = Quota(ANYBODY, clock)

  @property
  def has_keys(self) -> bool:
    return bool(self._keys)

  def of(self, authorization: str | None) -> Quota:
    """Whose 'Bearer KEY' it is; as long whoever asks, and whatever key.

    Raises:
      ApiError: 401.
    """
    if not self._keys:
      return self._anybody
    scheme, _, key = (authorization or '').partition(' ')
    digest, found = _digest(key.strip()), None
    for known, quota in self._keys:
      if hmac.compare_digest(known, digest):
        found = quota
    if found is None or scheme.lower() != 'bearer':
      raise ApiError(
        401,
        'A valid API key is needed: Authorization: Bearer KEY.',
        'invalid_api_key',
        headers={'www-authenticate': 'Bearer'},
      )
    return found


def _digest(key: str) -> bytes:
  """All of one length, and no key is kept in memory."""
  return hashlib.sha256(key.encode('utf-8', 'surrogatepass')).digest()


def from_file(path: str | Path) -> Tenants:
  """A JSON list of objects: `name`, `key` and what else `Tenant` has.

  Raises:
    ValueError: not such a list; keys are never part of the message.
    OSError: no such file.
  """
  try:
    entries = json.loads(Path(path).read_text(encoding='utf-8'))
    return Tenants([_entry(entry) for entry in entries])
  except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
    what = type(error).__name__
    raise ValueError(f'{path}: not a list of tenants ({what})') from None


def from_text(text: str) -> Tenants:
  """'alice:KEY,bob:KEY', as in an environment variable.

  Raises:
    ValueError: a part is not of that form.
  """
  parts = [part.strip().partition(':') for part in text.split(',')]
  if not all(name and key for name, _, key in parts):
    raise ValueError('API keys must read NAME:KEY,NAME:KEY')
  return Tenants([(key, Tenant(name, _salt(name))) for name, _, key in parts])


def _entry(entry: dict[str, Any]) -> tuple[str, Tenant]:
  rest = {k: v for k, v in entry.items() if k not in ('key', 'name', 'salt')}
  name, key = entry['name'], entry['key']
  if not isinstance(name, str) or not isinstance(key, str):
    raise TypeError
  return key, Tenant(name, entry.get('salt', _salt(name)), **rest)


def _salt(name: str) -> str:
  """The same in every process, as blocks outlive one."""
  return hashlib.sha256(b'tenant ' + name.encode()).hexdigest()

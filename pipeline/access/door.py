"""Who is let in: keys from file and settings, the file read again when it changes."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from infra.access_config import AccessConfig
from infra.api_key import hash_of
from infra.file_stamp import FileStamp
from infra.log import Logger
from pipeline.access.budgets import Budgets, open_budgets
from pipeline.access.errors import InvalidApiKey
from pipeline.access.key import ApiKey
from pipeline.access.key_file import keys_of_settings, read_keys
from pipeline.access.permit import ANYONE, KeyPermit, MeteredPermit, Permit
from schemas.errors import ConfigError

_SCHEME = b"bearer"


class OpenDoor:
    """Everybody may enter: no keys are asked for."""

    needs_key = False

    def permit(self, authorization: bytes | None) -> Permit:
        """That of anyone."""
        return ANYONE

    async def run(self, every_s: float) -> None:
        """Nothing: there is nothing to read again."""


class KeyDoor(OpenDoor):
    """Only keys open it.

    A key is looked up by its SHA-256. Whoever guesses learns nothing from the time that takes: the
    hash of a guess shares no beginning with a stored one that could be found byte by byte, known
    and unknown keys go the same way, and what is found is compared in constant time once more.

    Args:
        path: the file; None when all keys are ``fixed``.
        fixed: keys that no file changes.

    Raises:
        ConfigError: the file can't be used; names the field.
    """

    needs_key = True

    def __init__(
        self,
        path: Path | None,
        fixed: Sequence[ApiKey],
        budgets: Budgets,
        log: Logger,
        *,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._fixed = tuple(fixed)
        self._budgets = budgets
        self._log = log
        self._now_unix_s = now_unix_s
        self._stamp = FileStamp(path)
        self._refused = ""
        self._keys: dict[bytes, ApiKey] = {}
        self._read()

    @property
    def num_keys(self) -> int:
        """Keys known, expired and revoked ones too."""
        return len(self._keys)

    def permit(self, authorization: bytes | None) -> Permit:
        """That of the key in an ``Authorization`` header.

        Raises:
            InvalidApiKey: there is none, or it opens nothing.
        """
        key = self._find(authorization)
        state = key.state(self._now_unix_s())
        if state != "valid":
            raise InvalidApiKey(f"this API key is {state}")
        return MeteredPermit(key, self._budgets) if key.is_limited else KeyPermit(key)

    def _find(self, authorization: bytes | None) -> ApiKey:
        scheme, _, given = (authorization or b"").partition(b" ")
        given = given.strip()
        if scheme.lower() != _SCHEME or not given:
            raise InvalidApiKey("an API key is needed: send the header Authorization: Bearer KEY")
        digest = hash_of(given)
        key = self._keys.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            raise InvalidApiKey("this API key is not known")
        return key

    async def run(self, every_s: float) -> None:
        """Look for changes of the file. For ever."""
        while True:
            await asyncio.sleep(every_s)
            self.refresh()

    def refresh(self) -> None:
        """Take the file's keys if it has changed. One that can't be used changes nothing, and is
        logged once."""
        if not self._stamp.has_news:
            return
        try:
            is_new = self._read()
        except ConfigError as error:
            if error.message != self._refused:
                self._log.error("api_keys_refused", field=error.param, reason=error.message)
            self._refused = error.message
        else:
            self._refused = ""
            if is_new:
                self._log.info("api_keys_read", num_keys=len(self._keys))

    def _read(self) -> bool:
        """Read all keys anew; returns whether any is another one now."""
        self._stamp.take()
        found = () if self._path is None else read_keys(self._path)
        # Where both name a key, the file has more to say of it.
        keys = {key.digest: key for key in (*self._fixed, *found)}
        is_new, self._keys = keys != self._keys, keys
        return is_new


@contextlib.contextmanager
def open_door(config: AccessConfig, data: Path, log: Logger) -> Iterator[OpenDoor]:
    """The door that ``config`` asks for; budgets lie in ``data``.

    Raises:
        ConfigError: the keys, or the directory, can't be used.
    """
    if not config.has_keys:
        yield OpenDoor()
        return

    def stuck() -> None:
        log.warning("api_key_budgets_stuck", reason="a bridge is frozen in the midst of a charge")

    with open_budgets(data, on_stuck=stuck) as budgets:
        door = KeyDoor(config.api_keys, keys_of_settings(config.api_key), budgets, log)
        log.info("api_keys_read", num_keys=door.num_keys)
        yield door

"""Read the API keys that a server elsewhere is sent."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import structlog

from baton.config.groups import EngineSettings
from baton.errors import SettingsError

KEY = re.compile(r"[\x21-\x7e]{1,4096}")
"""What a header can carry after `Bearer `."""


@dataclass(frozen=True)
class Key:
    """The key for one tenant's requests.

    Attributes:
        value: the key; None: none is sent.
        own: whether no other tenant's requests are sent with it.
    """

    value: str | None
    own: bool


class RemoteKeys:
    """The keys of one engine, read again by `refresh`.

    Raises:
        SettingsError: a file cannot be read, or holds no key.
    """

    def __init__(self, engine: EngineSettings) -> None:
        self._engine = engine.name
        self._file, self._folder = engine.remote.key_file, engine.remote.keys_dir
        self._common, self._own, self._several = self._read()

    def of(self, tenant: str) -> Key:
        """Return the key for a tenant's requests."""
        own = self._own.get(tenant)
        return Key(self._common, own=False) if own is None else Key(own, own=own not in self._several)

    @property
    def of_looks(self) -> Key:
        """The key with which the server is looked at."""
        return Key(self._common or next(iter(self._own.values()), None), own=False)

    @property
    def common(self) -> str | None:
        """The key of tenants without one of their own."""
        return self._common

    def refresh(self) -> None:
        """Read the files again; what cannot be read leaves the keys as they are. Blocks."""
        try:
            self._common, self._own, self._several = self._read()
        except SettingsError as error:
            structlog.get_logger("baton.engine").warning("remote_keys_not_read", reason=error.message)

    def _read(self) -> tuple[str | None, dict[str, str], frozenset[str]]:
        """Return the common key, those of tenants, and those among them that are not one tenant's alone."""
        common = self._key("key_file", self._file) if self._file is not None else None
        if self._folder is None:
            return common, {}, frozenset()
        try:
            files = [each for each in self._folder.expanduser().iterdir() if _names_a_tenant(each)]
        except OSError as error:
            raise self._wrong("keys_dir", self._folder, error.strerror or "cannot be read") from None
        own = {file.name: self._key("keys_dir", file) for file in files}
        uses = Counter([*own.values(), *([common] if common is not None else [])])
        return common, own, frozenset(key for key, times in uses.items() if times > 1)

    def _key(self, setting: str, file: Path) -> str:
        try:
            text = file.expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise self._wrong(setting, file, reason or "cannot be read") from None
        if not KEY.fullmatch(text):
            raise self._wrong(setting, file, "holds no key: one line of printable ASCII without spaces")
        return text

    def _wrong(self, setting: str, file: Path, reason: str) -> SettingsError:
        return SettingsError(f"engines '{self._engine}': remote.{setting}: {file}: {reason}")


def _names_a_tenant(file: Path) -> bool:
    """Return whether a file is a tenant's; names that begin with a dot are of mounts and editors."""
    return not file.name.startswith(".") and file.is_file()

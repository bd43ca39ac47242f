"""Records on disk, one small JSON file a handoff, so that handoffs outlive the process."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import structlog
from pydantic import ValidationError

from baton.handoffs.record import HandoffRecord

ABANDONED_AFTER_S = 60.0
ID = re.compile(r"[A-Za-z0-9_-]{16,64}")


class RecordFiles:
    """A folder of records. Whatever goes wrong here costs a record its life beyond the process, no more.

    Args:
        folder: made with mode 0700 when it is missing; None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._log = structlog.get_logger("baton.handoffs")
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, record: HandoffRecord) -> bool:
        """Keep a record, whole or not at all; whether it is kept."""
        if self._folder is None:
            return False
        aside = self._folder / f".{secrets.token_hex(8)}"
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                stream.write(record.model_dump_json())
            os.replace(aside, self._path(record.id))
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            self._log.warning("handoff_not_kept", reason=error.strerror)
            return False
        return True

    def read(self, handoff_id: str) -> HandoffRecord | None:
        """One record, if there is one: another gateway over the same store may have left it."""
        if self._folder is None or ID.fullmatch(handoff_id) is None:
            return None
        return self._read(self._path(handoff_id))

    def exists(self, handoff_id: str) -> bool:
        """Whether there is a record of that id."""
        return self._folder is not None and self._path(handoff_id).exists()

    def read_all(self) -> Iterator[HandoffRecord]:
        """Every record that can be read; one that is no JSON is removed."""
        if self._folder is None:
            return
        for path in self._folder.glob(".*"):  # a killed writer's, unless one is writing just now
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                    path.unlink()
        for path in self._folder.glob("*.json"):
            if (record := self._read(path)) is not None:
                yield record

    def remove(self, record: HandoffRecord) -> None:
        """Forget a record.

        Raises:
            OSError: it could not be removed.
        """
        if self._folder is not None:
            self._path(record.id).unlink(missing_ok=True)

    def _read(self, path: Path) -> HandoffRecord | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            return HandoffRecord.model_validate_json(data)
        except ValidationError as error:
            self._log.warning("handoff_unreadable", file=path.name)
            if error.errors(include_input=False)[0]["type"] == "json_invalid":  # not another version's
                path.unlink(missing_ok=True)
            return None

    def _path(self, handoff_id: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{handoff_id}.json"

"""Keep responses in one SQLite file, within a budget of bytes that the tenants share fairly.

A response names the one before it, so that a conversation of n turns takes the space of n turns. What was
deleted or has expired cannot be read any more, but its text stays as long as a later response continues it.
Several gateways may use one file. A process that is killed leaves it whole.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import structlog

from baton.responses.response import NewResponse, Turn
from baton_kv.folders import make_folder

FILE = "responses-2.sqlite"
"""Name of the file; the number is the version of its tables."""
BUSY_S = 5.0
"""Seconds to wait for another gateway that uses the file."""
PAGE = 4096
"""Bytes of the file's pages: what a response takes is rounded up to them."""
EXPIRED_AT_ONCE = 100
"""Most responses that one save removes because they have expired."""
EVICTED_AT_ONCE = 64
"""Most responses that are evicted before others have a turn at the file."""
FULL_TRIES = 8
"""Times that a save makes room on a full device, before its response is not stored."""
ROW_BYTES = 256
"""Bytes that a response takes beside its texts, about."""
TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, created_at REAL NOT NULL,
    expires_at REAL NOT NULL, used_at REAL NOT NULL, deleted INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL, input TEXT NOT NULL, output TEXT NOT NULL, body TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_previous ON responses (previous);
CREATE INDEX IF NOT EXISTS by_use ON responses (tenant, used_at, created_at DESC);
CREATE INDEX IF NOT EXISTS by_expiry ON responses (deleted, expires_at);
CREATE TABLE IF NOT EXISTS usage (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO usage VALUES (new.tenant, new.bytes)
        ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + new.bytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE usage SET bytes = bytes - old.bytes WHERE tenant = old.tenant;
    DELETE FROM usage WHERE tenant = old.tenant AND bytes <= 0;
END;
"""
CHAIN = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM responses
        WHERE id = :id AND tenant = :tenant AND deleted = 0 AND expires_at > :now
    UNION ALL
    SELECT responses.id, responses.previous, depth + 1 FROM responses
        JOIN chain ON responses.id = chain.previous WHERE responses.tenant = :tenant
)
"""
"""The response `:id` and all that it continues."""

Result = TypeVar("Result")
log = structlog.get_logger("baton.responses")


class ResponseStore:
    """The stored responses of all tenants. All calls block; threads take turns.

    Args:
        folder: where the file is; created with mode 0700 when it is missing.
        budget: most bytes that responses take, in pages of the file.
        durable: wait for the device before a response counts as stored.
        wall: seconds since the epoch.

    Raises:
        OSError: the folder is a link or another user's, or cannot be created.
        sqlite3.Error: the file cannot be used.
    """

    def __init__(
        self, folder: Path, budget: int, *, durable: bool = False, wall: Callable[[], float] = time.time
    ) -> None:
        self._budget = budget
        self._wall = wall
        make_folder(folder)
        self._lock = threading.Lock()
        self._connection = _open(folder / FILE, durable=durable)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def save(self, response: NewResponse, ttl_s: float) -> bool:
        """Store a response that lives `ttl_s` seconds.

        The least recently used responses of the tenant with most bytes make room, but none that this one
        continues; so they do while the device is full. They go in batches, between which others have a turn.

        Returns:
            Whether it was stored: not if there is no room, or what it continues was deleted meanwhile.

        Raises:
            sqlite3.Error: the file cannot be used.
        """
        texts = (response.input, response.output, response.body)
        size = -(-(sum(map(len, texts)) + ROW_BYTES) // PAGE) * PAGE
        self._whatever_the_device(self._drop_expired)
        for full in (False, *[True] * FULL_TRIES):
            try:
                while (fits := self._make_room(response, size, full=full)) is None:
                    pass
                return fits and self._insert(response, size, ttl_s)
            except sqlite3.OperationalError as error:
                _require_full(error)
        return False

    def _drop_expired(self, *, full: bool) -> None:
        with self._change(full=full) as (database, now):
            _drop_expired(database, now)

    def _insert(self, response: NewResponse, size: int, ttl_s: float) -> bool:
        with self._change() as (database, now):
            used = self._touch(response.previous, response.tenant, now)
            row = (response.id, response.tenant, response.previous, response.created_at, now + ttl_s, used)
            texts = (response.input, response.output, response.body)
            database.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?)", (*row, size, *texts)
            )
            if self._is_whole(response) and self._evict(response.tenant, used, self._budget):
                return True
            database.rollback()
        return False

    def body(self, response_id: str, tenant: str) -> str | None:
        """Return one of a tenant's responses as JSON.

        Returns:
            None: it is unknown, expired, deleted, or another tenant's.
        """
        query = "SELECT body FROM responses WHERE id = ? AND tenant = ? AND deleted = 0 AND expires_at > ?"
        with self._lock:
            row = self._connection.execute(query, (response_id, tenant, self._wall())).fetchone()
        return str(row[0]) if row is not None else None

    def body_size(self, response_id: str, tenant: str) -> int | None:
        """Return the bytes of one of a tenant's responses as JSON; None as for `body`."""
        query = (
            "SELECT LENGTH(body) FROM responses"
            " WHERE id = ? AND tenant = ? AND deleted = 0 AND expires_at > ?"
        )
        with self._lock:
            row = self._connection.execute(query, (response_id, tenant, self._wall())).fetchone()
        return int(row[0]) if row is not None else None

    def size(self, response_id: str, tenant: str) -> int:
        """Return how many bytes the items of a response take, with those of all that it continues."""
        names = {"id": response_id, "tenant": tenant, "now": self._wall()}
        query = CHAIN + "SELECT TOTAL(LENGTH(input) + LENGTH(output)) FROM responses JOIN chain USING (id)"
        with self._lock:
            return int(self._connection.execute(query, names).fetchone()[0])

    def conversation(self, response_id: str, tenant: str) -> list[Turn]:
        """Return the items of a response and of all that it continues, the oldest first.

        Returns:
            An empty list: the response does not exist, as for `body`, or one that it continues is lost.
        """
        query = CHAIN + (
            "SELECT responses.previous, responses.id, input, output"
            " FROM responses JOIN chain USING (id) ORDER BY depth DESC"
        )
        names = {"id": response_id, "tenant": tenant, "now": self._wall()}
        with self._lock:
            rows = self._connection.execute(query, names).fetchall()
        whole = rows and rows[0][0] is None
        return [Turn(name, given, output) for _, name, given, output in rows] if whole else []

    def note_use(self, response_id: str, tenant: str) -> None:
        """Note that a response is continued, so that it is not evicted before others."""
        with self._change() as (_, now):
            self._touch(response_id, tenant, now)

    def delete(self, response_id: str, tenant: str) -> bool:
        """Delete one of a tenant's responses; returns whether it existed. It works on a full device too."""

        def work(*, full: bool) -> bool:
            with self._change(full=full) as (database, now):
                gone = database.execute(
                    "UPDATE responses SET deleted = 1"
                    " WHERE id = ? AND tenant = ? AND deleted = 0 AND expires_at > ?",
                    (response_id, tenant, now),
                ).rowcount
                if gone:
                    _drop(database, response_id)
            return bool(gone)

        return self._whatever_the_device(work)

    def _whatever_the_device(self, work: Callable[..., Result]) -> Result:
        """Do work that frees space; if the device is too full for a journal, without one on it."""
        try:
            return work(full=False)
        except sqlite3.OperationalError as error:
            _require_full(error)
            return work(full=True)

    def usage(self) -> tuple[int, int]:
        """Return the number of responses and the bytes that they take."""
        with self._lock:
            number = self._connection.execute("SELECT COUNT(*) FROM responses").fetchone()[0]
            return int(number), self._total()

    @contextlib.contextmanager
    def _change(self, *, full: bool = False) -> Iterator[tuple[sqlite3.Connection, float]]:
        """Hold the file's lock against other gateways; commit at the end, or roll back what failed.

        Args:
            full: the device is full, so what undoes the change is kept in memory: a process that is killed at
                this moment may leave a damaged file, which the next start puts aside.

        Yields:
            The connection, and the time.
        """
        with self._lock:
            if full:
                self._connection.execute("PRAGMA journal_mode = MEMORY")
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                with self._connection:
                    yield self._connection, self._wall()
            finally:
                if full:
                    self._connection.execute("PRAGMA journal_mode = TRUNCATE")

    def _is_whole(self, response: NewResponse) -> bool:
        """Return whether what a response continues is stored; it may have been deleted meanwhile."""
        names = (response.previous, response.tenant)
        found = self._connection.execute("SELECT 1 FROM responses WHERE id = ? AND tenant = ?", names)
        return response.previous is None or found.fetchone() is not None

    def _touch(self, response_id: str | None, tenant: str, now: float) -> float:
        """Mark a response, and what it continues, as the last ones that their tenant used.

        Returns:
            The number of this use. The order is that of a counter: clocks are set back.
        """
        found = self._connection.execute(
            "SELECT MAX(used_at) FROM responses WHERE tenant = ?", (tenant,)
        ).fetchone()
        used = float(found[0] or 0) + 1
        self._connection.execute(
            CHAIN + "UPDATE responses SET used_at = :used WHERE id IN (SELECT id FROM chain)",
            {"id": response_id, "tenant": tenant, "now": now, "used": used},
        )
        return used

    def _make_room(self, response: NewResponse, size: int, *, full: bool) -> bool | None:
        """Remove some responses until another one fits.

        Args:
            size: its bytes.
            full: the device has no room for what is there now.

        Returns:
            Whether it fits; None: more must go.
        """
        with self._change(full=full) as (database, now):
            used = self._touch(response.previous, response.tenant, now)
            kept = database.execute(
                "SELECT TOTAL(bytes) FROM responses WHERE tenant = ? AND used_at = ?", (response.tenant, used)
            ).fetchone()[0]
            most = (min(self._budget, self._total()) if full else self._budget) - size
            if kept + size > self._budget or most < kept:
                return False
            before = self._total()
            if self._evict(response.tenant, used, most):
                return True
            return None if self._total() < before else False

    def _evict(self, tenant: str, used: float, most: int) -> bool:
        """Remove a batch of responses, but none that a tenant used last; returns whether enough are gone.

        Args:
            most: bytes that all responses may take.
        """
        for _ in range(EVICTED_AT_ONCE):
            if self._total() <= most:
                return True
            found = self._connection.execute(
                "SELECT id, previous FROM responses WHERE used_at < :most AND tenant = :tenant"
                " ORDER BY used_at, created_at DESC LIMIT 1",
                self._largest(tenant, used),
            ).fetchone()
            if found is None:
                break
            self._connection.execute("DELETE FROM responses WHERE id = ?", found[:1])
            _drop(self._connection, found[1])
        return self._total() <= most

    def _largest(self, tenant: str, used: float) -> dict[str, object]:
        """Return the tenant with most bytes, and the use before which its responses may go."""
        found = self._connection.execute("SELECT tenant FROM usage ORDER BY bytes DESC LIMIT 1").fetchone()
        largest = found[0] if found is not None else tenant
        return {"tenant": largest, "most": used if largest == tenant else math.inf}

    def _total(self) -> int:
        return int(self._connection.execute("SELECT TOTAL(bytes) FROM usage").fetchone()[0])


def _open(path: Path, *, durable: bool) -> sqlite3.Connection:
    """Open the file; a damaged one is put aside, and a new one is begun."""
    try:
        return _connect(path, durable=durable)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):  # it is not damaged, but cannot be used
            raise
        log.error("responses_damaged", file=str(path), reason=str(error))
        os.replace(path, path.with_suffix(".damaged"))
        path.with_name(f"{FILE}-journal").unlink(missing_ok=True)  # it would be applied to the new file
        return _connect(path, durable=durable)


def _connect(path: Path, *, durable: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA page_size = {PAGE}")
        connection.execute("PRAGMA auto_vacuum = FULL")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.executescript(TABLES)
        whole = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if whole != "ok":
            raise sqlite3.DatabaseError(whole)
    except BaseException:
        connection.close()
        raise
    return connection


def _require_full(error: sqlite3.OperationalError) -> None:
    """Raise an error again that does not say that the device is full."""
    if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
        raise error


def _drop_expired(database: sqlite3.Connection, now: float) -> None:
    """Remove some of what has expired; what is still continued stays, as if it was deleted."""
    expired = database.execute(
        "SELECT id FROM responses WHERE deleted = 0 AND expires_at <= ? ORDER BY expires_at LIMIT ?",
        (now, EXPIRED_AT_ONCE),
    ).fetchall()
    for (response_id,) in expired:
        database.execute("UPDATE responses SET deleted = 1 WHERE id = ?", (response_id,))
        _drop(database, response_id)


def _drop(database: sqlite3.Connection, response_id: str | None) -> None:
    """Remove a deleted response that nothing continues, and what only it continued, if that is deleted."""
    while response_id is not None:
        found = database.execute(
            "SELECT previous FROM responses WHERE id = ? AND deleted = 1 AND NOT EXISTS"
            " (SELECT 1 FROM responses AS later WHERE later.previous = responses.id)",
            (response_id,),
        ).fetchone()
        if found is None:
            return
        database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
        response_id = found[0]

"""Keep files and batches in one folder: what they are in an SQLite file, what they hold in a file each.

Every change is one transaction, so a process that is killed leaves all of it or nothing: an answer is stored
together with the count of its line, and a line whose answer is stored is never given out again. Several
gateways of one machine may use one folder; the one that holds `runner.lock` runs its batches.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import baton_spool
from baton.config.groups import BatchSettings
from baton.engines.backend import Json
from baton.errors import BatchNotFound, ClientFileNotFound, FileInUse, InvalidRequest, QuotaReached
from baton_kv.folders import make_folder, open_file
from baton_spool import Made, Naming

DATABASE = "batches-1.sqlite"
"""Name of the SQLite file; the number is the version of its tables."""
FILES = "files"
LOCK = "runner.lock"
ARRIVING = Naming("baton-file-")
"""Files that are being written; the next start removes those of a killed process."""
BUSY_S = 10.0
"""Seconds to wait for another gateway that uses the SQLite file."""
FOLLOWING = 64
"""Lines that are read from the SQLite file at once."""
PIECE = 1024 * 1024
TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL,
    purpose TEXT NOT NULL, name TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at REAL NOT NULL, expires_at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of ON files (tenant, number);
CREATE INDEX IF NOT EXISTS files_end ON files (expires_at);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL,
    key_id TEXT NOT NULL, input TEXT NOT NULL, status TEXT NOT NULL, open INTEGER NOT NULL,
    created_at REAL NOT NULL, ends_at REAL NOT NULL, output_ttl_s REAL NOT NULL,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0, prompt INTEGER NOT NULL DEFAULT 0, cached INTEGER NOT NULL DEFAULT 0,
    answer INTEGER NOT NULL DEFAULT 0, thoughts INTEGER NOT NULL DEFAULT 0, shown TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of ON batches (tenant, number);
CREATE INDEX IF NOT EXISTS batches_open ON batches (open, number);
CREATE TABLE IF NOT EXISTS lines (
    batch INTEGER NOT NULL, place INTEGER NOT NULL, line INTEGER NOT NULL, start INTEGER NOT NULL,
    size INTEGER NOT NULL, custom_id TEXT NOT NULL, PRIMARY KEY (batch, place)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answers (
    batch INTEGER NOT NULL, line INTEGER NOT NULL, good INTEGER NOT NULL, text TEXT NOT NULL,
    PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
STATUSES = frozenset({"validating", "in_progress", "finalizing", "cancelling"}) | ENDED
NOT_RUN = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
    "failed": ("batch_failed", "The batch failed before this request was executed."),
}
"""Code and message of lines that were not run, by how their batch ended."""


@dataclass(frozen=True)
class Line:
    """A line of a batch's input file.

    Attributes:
        place: its place in the order in which lines are run.
        number: its number in the file, from 1.
        start: where it begins in the file, in bytes.
        size: its bytes.
    """

    place: int
    number: int
    start: int
    size: int
    custom_id: str


@dataclass(frozen=True)
class Usage:
    """The tokens of answers.

    Attributes:
        cached: of the prompt, those that were not computed again.
        thoughts: of the answer, those of the reasoning.
    """

    prompt: int = 0
    cached: int = 0
    answer: int = 0
    thoughts: int = 0


@dataclass(frozen=True)
class Batch:
    """A batch as the store has it.

    Attributes:
        number: its number in the store.
        input: id of its input file.
        shown: the fields that clients see and that no line changes.
    """

    number: int
    id: str
    tenant: str
    key_id: str
    input: str
    status: str
    ends_at: float
    shown: Json


@dataclass(frozen=True)
class Wanted:
    """A new batch, as a client asked for it.

    Attributes:
        window_s: seconds in which it must be done.
        output_ttl_s: seconds that its output lives.
    """

    input: str
    endpoint: str
    window: str
    window_s: float
    output_ttl_s: float
    metadata: dict[str, str] | None


class BatchStore:
    """The files and batches of all tenants in one folder. All calls block; threads take turns.

    Args:
        folder: created with mode 0700 when it is missing.
        now: seconds since the epoch, which do not jump while the process runs.

    Raises:
        OSError: the folder is a link or another user's, or cannot be created.
        sqlite3.Error: the SQLite file cannot be used.
    """

    def __init__(self, folder: Path, settings: BatchSettings, now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        make_folder(folder)
        make_folder(folder / FILES)
        self._files, self._path = folder / FILES, folder / DATABASE
        self._lock = threading.Lock()
        self._runner = open_file(folder / LOCK, flags=os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._database = _connect(self._path)
            self._mend_clock()
        except BaseException:
            os.close(self._runner)
            raise

    def close(self) -> None:
        """Close everything, and let another gateway run what is left."""
        with self._lock:
            self._database.close()
            os.close(self._runner)

    def try_to_run(self) -> bool:
        """Take the lock of the gateway that runs the batches, and remove what killed ones left.

        Returns:
            False: another gateway has it.
        """
        try:
            fcntl.flock(self._runner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with self._change() as database:  # nobody puts a file in its place meanwhile
            known = {row[0] for row in database.execute("SELECT id FROM files")}
            for name in os.listdir(self._files):
                if name not in known and not ARRIVING.fits(name):
                    (self._files / name).unlink(missing_ok=True)
        baton_spool.sweep(self._files, ARRIVING)
        return True

    def _mend_clock(self) -> None:
        """Have nothing live longer than it would where the clock was set back while no gateway ran."""
        with self._change() as database:
            for table, end in (("files", "expires_at"), ("batches", "ends_at")):
                database.execute(
                    f"UPDATE {table} SET {end} = ? + {end} - created_at, created_at = ? WHERE created_at > ?",
                    (now := self._now(), now, now),
                )

    # Files

    def arriving(self, tenant: str) -> Made:
        """Make the file into which an upload is written.

        Raises:
            QuotaReached: see `require_room`.
        """
        self.require_room(tenant)
        return baton_spool.make(self._files, ARRIVING)

    def require_room(self, tenant: str, size: int = 0, *, files: int = 1) -> None:
        """Require that a tenant may store so many files more, of so many bytes.

        Raises:
            QuotaReached: the tenant has as many files or bytes as it may, or all tenants together do.
        """
        with self._lock:
            number, mine = self._database.execute(
                "SELECT COUNT(*), TOTAL(bytes) FROM files WHERE tenant = ?", (tenant,)
            ).fetchone()
            mine += self._answers("tenant = ?", tenant)
            every = self._database.execute("SELECT TOTAL(bytes) FROM files").fetchone()[0]
            every += self._answers("1")
        settings = self._settings
        if files and number + files > settings.tenant_files:
            raise QuotaReached(
                f"You have {number} files, and may have no more (setting batches.tenant_files)."
            )
        if mine + size > settings.tenant_bytes:
            with_it = " with this one" if size else ""
            raise QuotaReached(
                f"Your files and answers take {int(mine + size)} bytes{with_it}; at most "
                f"{int(settings.tenant_bytes)} are allowed (setting batches.tenant_bytes). Delete files that "
                "you need no more."
            )
        if every + size > settings.total_bytes:  # how much others have is not told
            raise QuotaReached(
                "The files and answers of all tenants together take all the room there is (setting "
                "batches.total_bytes). Delete files that you need no more, or try again later."
            )

    def _answers(self, which: str, *values: object) -> float:
        """Sum the bytes of answers that are in no file yet."""
        query = f"SELECT TOTAL(bytes) FROM batches WHERE open = 1 AND {which}"
        return float(self._database.execute(query, values).fetchone()[0])

    def add_file(self, made: Made, tenant: str, purpose: str, name: str, ttl_s: float) -> Json:
        """Keep an uploaded file; return its object.

        Raises:
            QuotaReached: see `require_room`.
        """
        os.fsync(made.descriptor)
        size = os.fstat(made.descriptor).st_size
        self.require_room(tenant, size)
        file_id = f"file-{secrets.token_hex(12)}"
        try:
            with self._change() as database:
                row = self._insert_file(database, file_id, tenant, purpose, name, size, ttl_s)
                os.replace(made.path, self._files / file_id)
        except BaseException:
            (self._files / file_id).unlink(missing_ok=True)
            raise
        return row

    def _insert_file(
        self,
        database: sqlite3.Connection,
        file_id: str,
        tenant: str,
        purpose: str,
        name: str,
        size: int,
        ttl_s: float,
    ) -> Json:
        now = self._now()
        row = (file_id, tenant, purpose, name, size, now, now + ttl_s)
        database.execute(
            "INSERT INTO files (id, tenant, purpose, name, bytes, created_at, expires_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            row,
        )
        return _file_object((file_id, purpose, name, size, now, now + ttl_s))

    def file(self, file_id: str, tenant: str) -> Json:
        """Return the object of one of a tenant's files.

        Raises:
            ClientFileNotFound: it is unknown, deleted, expired, or another tenant's.
        """
        query = (
            "SELECT id, purpose, name, bytes, created_at, expires_at FROM files"
            " WHERE id = ? AND tenant = ? AND expires_at > ?"
        )
        with self._lock:
            row = self._database.execute(query, (file_id, tenant, self._now())).fetchone()
        if row is None:
            raise ClientFileNotFound()
        return _file_object(row)

    def content(self, file_id: str, tenant: str) -> tuple[Json, Path]:
        """Return the object of one of a tenant's files, and where its bytes are.

        Raises:
            ClientFileNotFound: see `file`.
        """
        return self.file(file_id, tenant), self._files / file_id

    def files(
        self, tenant: str, *, limit: int, after: str | None, newest_first: bool, purpose: str | None
    ) -> tuple[list[Json], bool]:
        """List a tenant's files; return a page, and whether there are more.

        Raises:
            InvalidRequest: `after` is no file of the tenant's.
        """
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        with self._lock:
            start = self._number("files", after, tenant)
            rows = self._database.execute(
                "SELECT id, purpose, name, bytes, created_at, expires_at FROM files"
                " WHERE tenant = :tenant AND expires_at > :now AND (:purpose IS NULL OR purpose = :purpose)"
                f" AND (:start IS NULL OR number {sign} :start) ORDER BY number {order} LIMIT :limit",
                {
                    "tenant": tenant,
                    "now": self._now(),
                    "purpose": purpose,
                    "start": start,
                    "limit": limit + 1,
                },
            ).fetchall()
        return [_file_object(row) for row in rows[:limit]], len(rows) > limit

    def _number(self, table: str, after: str | None, tenant: str) -> int | None:
        if after is None:
            return None
        query = f"SELECT number FROM {table} WHERE id = ? AND tenant = ?"
        row = self._database.execute(query, (after, tenant)).fetchone()
        if row is None:
            raise InvalidRequest("'after' must be the id of an object of this list.", param="after")
        return int(row[0])

    def delete_file(self, file_id: str, tenant: str) -> None:
        """Delete one of a tenant's files. It works on a full device too.

        Raises:
            ClientFileNotFound: see `file`.
            FileInUse: an open batch reads it.
        """
        self.file(file_id, tenant)
        try:
            self._drop_file(file_id)
        except sqlite3.OperationalError:  # the device was full: its bytes are free now
            self._drop_file(file_id)

    def _drop_file(self, file_id: str) -> None:
        with self._change() as database:
            if _in_use(database, file_id):
                raise FileInUse()
            database.execute("DELETE FROM files WHERE id = ?", (file_id,))
            (self._files / file_id).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove expired files, but none that an open batch reads, and batches that ended long ago."""
        now = self._now()
        with self._lock:
            expired = self._database.execute(
                "SELECT id FROM files WHERE expires_at <= ? LIMIT 100", (now,)
            ).fetchall()
            old = self._database.execute(
                "SELECT number FROM batches WHERE open = 0 AND ends_at <= ? LIMIT 100",
                (now - self._settings.ttl_s,),
            ).fetchall()
        for (file_id,) in expired:
            with contextlib.suppress(FileInUse):
                self._drop_file(file_id)
        if old:
            with self._change() as database:
                database.executemany("DELETE FROM batches WHERE number = ?", old)

    def usage(self) -> tuple[int, int]:
        """Return the number of files, and the bytes of files and answers."""
        with self._lock:
            number, size = self._database.execute("SELECT COUNT(*), TOTAL(bytes) FROM files").fetchone()
            return int(number), int(size + self._answers("1"))

    # Batches

    def add_batch(self, wanted: Wanted, tenant: str, key_id: str) -> Json:
        """Begin a batch; return its object.

        Raises:
            ClientFileNotFound: there is no such input file.
            InvalidRequest: the file is not for batches.
            QuotaReached: the tenant has as many open batches as it may.
        """
        if self.file(wanted.input, tenant)["purpose"] != "batch":
            raise InvalidRequest(
                "'input_file_id' must be a file that was uploaded with the purpose 'batch'.",
                param="input_file_id",
            )
        batch_id, now = f"batch_{secrets.token_hex(12)}", self._now()
        shown = {
            "endpoint": wanted.endpoint,
            "completion_window": wanted.window,
            "metadata": wanted.metadata,
        }
        with self._change() as database:
            query = "SELECT COUNT(*) FROM batches WHERE open = 1 AND tenant = ?"
            number = database.execute(query, (tenant,)).fetchone()[0]
            if number >= self._settings.tenant_batches:
                raise QuotaReached(
                    f"You have {number} open batches, and may have no more (setting batches.tenant_batches): "
                    "wait until one has ended, or cancel one."
                )
            database.execute(
                "INSERT INTO batches (id, tenant, key_id, input, status, open, created_at, ends_at,"
                " output_ttl_s, shown) VALUES (?, ?, ?, ?, 'validating', 1, ?, ?, ?, ?)",
                (
                    *(batch_id, tenant, key_id, wanted.input, now, now + wanted.window_s),
                    *(wanted.output_ttl_s, json.dumps(shown)),
                ),
            )
        return self.shown(batch_id, tenant)

    def shown(self, batch_id: str, tenant: str) -> Json:
        """Return the object of one of a tenant's batches.

        Raises:
            BatchNotFound: it is unknown, or another tenant's.
        """
        with self._lock:
            rows = self._database.execute(
                f"SELECT {SHOWN} FROM batches WHERE id = ? AND tenant = ?",
                (batch_id, tenant),
            ).fetchall()
        if not rows:
            raise BatchNotFound()
        return _batch_object(rows[0])

    def list_batches(self, tenant: str, *, limit: int, after: str | None) -> tuple[list[Json], bool]:
        """List a tenant's batches, the newest first; return a page, and whether there are more.

        Raises:
            InvalidRequest: `after` is no batch of the tenant's.
        """
        with self._lock:
            start = self._number("batches", after, tenant)
            rows = self._database.execute(
                f"SELECT {SHOWN} FROM batches WHERE tenant = ? AND (? IS NULL OR number < ?)"
                " ORDER BY number DESC LIMIT ?",
                (tenant, start, start, limit + 1),
            ).fetchall()
        return [_batch_object(row) for row in rows[:limit]], len(rows) > limit

    def cancel(self, batch_id: str, tenant: str) -> Json:
        """Have a batch cancelled by the gateway that runs it; return its object.

        Raises:
            BatchNotFound: see `shown`.
            InvalidRequest: it has ended already.
        """
        if (status := self.shown(batch_id, tenant)["status"]) in ENDED:
            raise InvalidRequest(f"The batch has ended already: it is {status}.")
        self.enter(batch_id, "cancelling", unless=("cancelling", "finalizing"))
        return self.shown(batch_id, tenant)

    def open_batches(self) -> list[tuple[str, str]]:
        """Return the ids and the statuses of all batches that have not ended, the oldest first."""
        with self._lock:
            return self._database.execute(
                "SELECT id, status FROM batches WHERE open = 1 ORDER BY number"
            ).fetchall()

    def batch(self, batch_id: str) -> Batch:
        """Return a batch, of whatever tenant."""
        query = "SELECT number, id, tenant, key_id, input, status, ends_at, shown FROM batches WHERE id = ?"
        with self._lock:
            number, name, tenant, key_id, given, status, ends_at, shown = self._database.execute(
                query, (batch_id,)
            ).fetchone()
        return Batch(number, name, tenant, key_id, given, status, ends_at, json.loads(shown))

    def enter(self, batch_id: str, status: str, *, unless: Iterable[str] = ENDED, **shown: Any) -> None:
        """Put a batch into a status, with the time; not from one of some others, nor from an end.

        Args:
            shown: further fields that clients see.
        """
        with self._change() as database:
            self._enter(database, batch_id, status, {*unless, *ENDED}, shown)

    def _enter(
        self, database: sqlite3.Connection, batch_id: str, status: str, unless: set[str], shown: Json
    ) -> None:
        query = "SELECT status, shown FROM batches WHERE id = ?"
        before, written = database.execute(query, (batch_id,)).fetchone()
        if before in unless:
            return
        fields = json.loads(written) | {f"{status}_at": int(self._now())} | shown
        database.execute(
            "UPDATE batches SET status = ?, open = ?, shown = ? WHERE id = ?",
            (status, status not in ENDED, json.dumps(fields), batch_id),
        )

    def begin(self, batch: Batch, lines: list[Line], model: str | None) -> None:
        """Store the lines of a batch, and put it in progress unless it was cancelled."""
        with self._change() as database:
            database.execute("DELETE FROM lines WHERE batch = ?", (batch.number,))
            database.executemany(
                "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?)",
                (
                    (batch.number, line.place, line.number, line.start, line.size, line.custom_id)
                    for line in lines
                ),
            )
            database.execute("UPDATE batches SET total = ? WHERE id = ?", (len(lines), batch.id))
            named = {"model": model} if model is not None else {}
            self._enter(database, batch.id, "in_progress", {"cancelling", *ENDED}, named)

    def following(self, batch: Batch, place: int) -> list[Line]:
        """Return the next lines that have no answer, from a place on."""
        with self._lock:
            rows = self._database.execute(
                f"SELECT place, line, start, size, custom_id {LEFT} AND place >= ? ORDER BY place LIMIT ?",
                (batch.number, place, FOLLOWING),
            ).fetchall()
        return [Line(*row) for row in rows]

    def read(self, batch: Batch, line: Line) -> bytes:
        """Read a line of a batch's input.

        Raises:
            FileNotFoundError: somebody removed the file.
        """
        descriptor = open_file(self._files / batch.input)
        try:
            return os.pread(descriptor, line.size, line.start)
        finally:
            os.close(descriptor)

    def input_path(self, batch: Batch) -> Path:
        """Return where a batch's input file is."""
        return self._files / batch.input

    def record(self, batch: Batch, line: Line, text: str, usage: Usage, *, good: bool) -> bool:
        """Store the answer to a line and count it; False: it has one already."""
        counts = (good, not good, len(text) + 1, usage.prompt, usage.cached, usage.answer, usage.thoughts)
        with self._change() as database:
            added = database.execute(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", (batch.number, line.number, good, text)
            ).rowcount
            if added:
                database.execute(
                    "UPDATE batches SET completed = completed + ?, failed = failed + ?, bytes = bytes + ?,"
                    " prompt = prompt + ?, cached = cached + ?, answer = answer + ?, thoughts = thoughts + ?"
                    " WHERE number = ?",
                    (*counts, batch.number),
                )
        return bool(added)

    def finish(self, batch: Batch, end: str, errors: list[Json] | None = None) -> None:
        """Write the files of a batch from its answers, and end it; done twice, it is as if done once.

        Args:
            end: the status that it ends with.
            errors: why it failed, in OpenAI's shape.
        """
        with contextlib.closing(_Outputs(self._files)) as outputs:
            with contextlib.closing(_connect(self._path)) as reader:  # others go on meanwhile
                for good, text in reader.execute(
                    "SELECT good, text FROM answers WHERE batch = ? ORDER BY line", (batch.number,)
                ):
                    outputs.add(text, good=bool(good))
                if end in NOT_RUN:
                    query = f"SELECT line, custom_id {LEFT} ORDER BY line"
                    for line, custom_id in reader.execute(query, (batch.number,)):
                        outputs.add(_not_run(batch, line, custom_id, end), good=False)
            written = list(outputs.written())
            with self._change() as database:
                query = "SELECT output_ttl_s FROM batches WHERE number = ? AND open = 1"
                found = database.execute(query, (batch.number,)).fetchone()
                if found is None:
                    return
                shown: Json = {} if errors is None else {"errors": {"object": "list", "data": errors}}
                for field, made in written:
                    name = f"{batch.id}_{field.removesuffix('_file_id')}.jsonl"
                    file_id = f"file-{batch.id.removeprefix('batch_')}-{field[:3]}"
                    size = os.fstat(made.descriptor).st_size
                    self._insert_file(
                        database, file_id, batch.tenant, "batch_output", name, size, float(found[0])
                    )
                    os.replace(made.path, self._files / file_id)  # that of a try that failed, too
                    shown[field] = file_id
                self._enter(database, batch.id, end, set(), shown)
                for table in ("lines", "answers"):
                    database.execute(f"DELETE FROM {table} WHERE batch = ?", (batch.number,))
                database.execute("UPDATE batches SET bytes = 0 WHERE number = ?", (batch.number,))

    @contextlib.contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """Hold the SQLite file's lock against other gateways; commit at the end, or roll back what failed."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            with self._database:
                yield self._database


class _Outputs:
    """The output and the error file of a batch while they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Made] = {}
        self._held: dict[str, bytearray] = {}

    def add(self, text: str, *, good: bool) -> None:
        """Add a line to one of them."""
        field = "output_file_id" if good else "error_file_id"
        if field not in self._made:
            self._made[field] = baton_spool.make(self._folder, ARRIVING)
            self._held[field] = bytearray()
        held = self._held[field]
        held += text.encode() + b"\n"
        if len(held) >= PIECE:
            self._made[field].append(held)
            held.clear()

    def written(self) -> Iterator[tuple[str, Made]]:
        """Yield each file that has lines, under the field that names it."""
        for field, made in self._made.items():
            made.append(self._held[field])
            os.fsync(made.descriptor)
            yield field, made

    def close(self) -> None:
        """Remove their temporary names."""
        for made in self._made.values():
            made.remove()


LEFT = """
FROM lines WHERE batch = ? AND NOT EXISTS
    (SELECT 1 FROM answers WHERE answers.batch = lines.batch AND answers.line = lines.line)
"""
"""The lines of a batch that have no answer."""
SHOWN = (
    "id, input, status, created_at, ends_at, total, completed, failed, prompt, cached, answer, thoughts,"
    " shown"
)


def _batch_object(row: tuple[Any, ...]) -> Json:
    name, given, status, created, ends, total, completed, failed, prompt, cached, answer, thoughts, shown = (
        row
    )
    fields: Json = json.loads(shown)
    times = {f"{each}_at": None for each in sorted(STATUSES - {"validating"})}
    own = {
        "id": name,
        "object": "batch",
        "input_file_id": given,
        "status": status,
        "model": None,
        "errors": None,
        "output_file_id": None,
        "error_file_id": None,
        "created_at": int(created),
        "expires_at": int(ends),
        "request_counts": {"total": total, "completed": completed, "failed": failed},
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": prompt + answer,
        },
    }
    return own | times | fields


def _file_object(row: tuple[Any, ...]) -> Json:
    name, purpose, filename, size, created, expires = row
    return {
        "id": name,
        "object": "file",
        "bytes": size,
        "created_at": int(created),
        "expires_at": int(expires),
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def _not_run(batch: Batch, line: int, custom_id: str, end: str) -> str:
    code, message = NOT_RUN[end]
    return json.dumps(
        {
            "id": answer_id(batch, line),
            "custom_id": custom_id,
            "response": None,
            "error": {"code": code, "message": message},
        }
    )


def answer_id(batch: Batch, line: int) -> str:
    """Return the id of the answer to a line."""
    return f"batch_req_{batch.id.removeprefix('batch_')}_{line}"


def _in_use(database: sqlite3.Connection, file_id: str) -> bool:
    query = "SELECT 1 FROM batches WHERE open = 1 AND input = ?"
    return database.execute(query, (file_id,)).fetchone() is not None


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA auto_vacuum = FULL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")
        connection.executescript(TABLES)
    except BaseException:
        connection.close()
        raise
    return connection

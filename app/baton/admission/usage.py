"""Count the tokens of every tenant, key, model and day in one SQLite file, and hold keys to their budgets.

What a request used is what its answer's `usage` says, or what it had used when it failed or its client left.
It is added up in memory and written a moment later, in one transaction: a gateway that is killed loses what
ended in its last second at most, and nothing is ever written twice. Several gateways may use one file. The
day of a request is that of UTC at its end, so that a clock that is set back or forward moves what comes next
to another day, and neither loses nor doubles anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from baton.admission.api_keys import StoredKey
from baton.admission.fair_threads import in_own_thread
from baton.config.settings import Settings
from baton.errors import BudgetSpent, SettingsError, UsageUnavailable
from baton.telemetry.metrics import UsageMetrics

BUSY_S = 5.0
"""Seconds to wait for another gateway that writes the file."""
PAUSE_S = 0.5
"""Seconds between two writes, a millisecond of a processor each; what ends meanwhile is written together."""
RETRY_S = 1.0
"""Seconds until a write that failed, as on a full device, is tried again."""
VERSION = 1
"""Of the tables below."""
TABLES = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL, failed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, tenant, key, model)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_key ON usage (key, day);
"""
ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (day, tenant, key, model) DO UPDATE SET
    requests = requests + excluded.requests, failed = failed + excluded.failed,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens
"""
COUNTED = ("requests", "failed", "prompt_tokens", "completion_tokens")
HOW_TO_COUNT = "let usage.file name a file that it can write, and usage.keep_days be above 0"
GROUPS = ("day", "tenant", "key", "model")
"""By what usage may be told apart."""
log = structlog.get_logger("baton.usage")


class Row(NamedTuple):
    """The key under which requests are counted together.

    Attributes:
        day: of UTC, such as `2030-01-31`.
        key: id of the key; empty on a gateway without keys.
    """

    day: str
    tenant: str
    key: str
    model: str


@dataclass(frozen=True)
class Asked:
    """The usage that somebody asks for.

    Attributes:
        first: the first day.
        last: the last day.
        by: by what the rows are told apart, some of `GROUPS`; what is not named is added up.
        where: what rows must have, by name.
        limit: most rows.
        offset: rows that are left out at the beginning.
    """

    first: str
    last: str
    by: Sequence[str]
    where: Mapping[str, str]
    limit: int = 1
    offset: int = 0


class UsageFile:
    """The file. All calls block; threads take turns.

    Raises:
        OSError: the file or its folder cannot be made.
        sqlite3.Error: the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            # Whole after a power cut, too; what a killed process has written stays written.
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError("a later version of Baton has written it")
            self._database.executescript(TABLES)
            self._database.execute(f"PRAGMA user_version = {VERSION}")
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def add(
        self,
        rows: Mapping[Row, Counter[str]],
        *,
        keep_days: int | None = None,
        month: str = "",
        keys: Collection[str] = (),
    ) -> dict[str, Counter[str]]:
        """Add counts to rows, all of them or none; returns what some keys have spent then, as `spent` does.

        Args:
            keep_days: the days that have rows are kept up to this number, the last ones; by the clock, one
                that is far ahead would have all of them forgotten. None: nothing is forgotten now.
            month: of which they have spent it.
            keys: ids of these keys.
        """
        values = [(*row, *(counts[name] for name in COUNTED)) for row, counts in rows.items()]
        with self._lock, self._database as database:
            database.execute("BEGIN IMMEDIATE")
            database.executemany(ADD, values)
            if keep_days is not None:
                days = sorted(day for (day,) in database.execute("SELECT DISTINCT day FROM usage"))
                database.executemany("DELETE FROM usage WHERE day = ?", zip(days[:-keep_days], strict=True))
            return self._spent(month, keys)

    def spent(self, month: str) -> dict[str, Counter[str]]:
        """Return the tokens of each key, by the days of a month, such as `2030-01`."""
        with self._lock:
            return self._spent(month)

    def _spent(self, month: str, keys: Collection[str] | None = None) -> dict[str, Counter[str]]:
        query = (
            "SELECT key, day, SUM(prompt_tokens + completion_tokens) FROM usage"
            " WHERE {} day BETWEEN ? AND ? GROUP BY key, day"
        )
        days = (f"{month}-01", f"{month}-31")
        found: list[tuple[str, str, int]] = []
        if keys is None:
            found += self._database.execute(query.format(""), days)
        for key in keys or ():
            found += self._database.execute(query.format("key = ? AND"), (key, *days))
        spent: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for key, day, tokens in found:
            spent[key][day] = tokens
        return spent

    def rows(self, asked: Asked) -> list[dict[str, Any]]:
        """Return rows of usage, the earliest day first."""
        names, values = [name for name in GROUPS if name in asked.by], dict(asked.where)
        told = ", ".join([*names, *(f"SUM({name}) AS {name}" for name in COUNTED)])
        query = f"SELECT {told} FROM usage WHERE day BETWEEN :first AND :last"
        query += "".join(f" AND {name} = :{name}" for name in values if name in GROUPS)
        if names:
            query += f" GROUP BY {', '.join(names)} ORDER BY {', '.join(names)} LIMIT :limit OFFSET :offset"
        values |= {"first": asked.first, "last": asked.last}
        with self._lock:
            cursor = self._database.execute(query, values | {"limit": asked.limit, "offset": asked.offset})
            columns = [column[0] for column in cursor.description]
            return [dict(zip(columns, row, strict=True)) for row in cursor]


def open_usage(settings: Settings) -> UsageFile | None:
    """Open the file of a gateway; None: none is counted, or the settings name no file and there can be none.

    Raises:
        SettingsError: it cannot be used.
    """
    if not settings.usage.keep_days:
        return None
    path = settings.usage_file
    try:
        return UsageFile(path)
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if settings.usage.file is None and isinstance(error, OSError):  # as where the root is read-only
            log.warning("usage_not_counted", file=str(path), reason=reason, setting="usage.file")
            return None
        raise SettingsError(f"usage.file: {path}: {reason}; move it away, or name another file") from None


class Usage:
    """The usage of one gateway. Everything is called on its event loop.

    Args:
        file: where it is kept; None: it is not counted, and no key is held to a budget.
        keep_days: days for which it is kept.
        wall: returns Unix time.
    """

    def __init__(
        self,
        file: UsageFile | None,
        metrics: UsageMetrics,
        *,
        keep_days: int = 400,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._file = file
        self._metrics = metrics
        self._keep_days = keep_days
        self._forgot_on = ""  # the day on which days were forgotten last
        self._wall = wall
        self._pending: defaultdict[Row, Counter[str]] = defaultdict(Counter)
        self._writing: Mapping[Row, Counter[str]] = {}
        self._known = file.spent(self.today[:7]) if file is not None else {}
        self._fresh: defaultdict[str, Counter[str]] = defaultdict(Counter)  # tokens that are not in `_known`
        self._running: defaultdict[str, dict[str, Callable[[], int]]] = defaultdict(dict)
        self._budgeted: set[str] = set()
        self._new = asyncio.Event()
        self._turn = asyncio.Lock()
        self._failed = False
        metrics.unwritten.set_function(lambda: len(self._pending) + len(self._writing))

    @property
    def kept(self) -> bool:
        """Whether usage is counted."""
        return self._file is not None

    @property
    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._wall(), UTC)

    @property
    def today(self) -> str:
        """The day, of UTC."""
        return self._now.date().isoformat()

    def count(
        self,
        tenant: str,
        key: str,
        model: str,
        *,
        prompt: int,
        generated: int,
        failed: bool,
        requests: int = 1,
    ) -> None:
        """Count what a request has used; it is written a moment later.

        Args:
            key: id of its key; empty: there are no keys.
            prompt: prompt tokens.
            generated: tokens of answers.
            requests: 0: a part of a request, of which another part is counted too.
        """
        if self._file is None:
            return
        day = self.today
        counts = {"requests": requests, "failed": int(failed), "prompt_tokens": prompt}
        self._pending[Row(day, tenant, key, model)].update(counts | {"completion_tokens": generated})
        self._fresh[key][day] += prompt + generated
        self._new.set()

    def begin(self, key: StoredKey | None, request_id: str, uncounted: Callable[[], int]) -> None:
        """Require that a key's budgets are not spent, and watch what its request uses, until `end`.

        The tokens of requests under way count; those that run when a budget is spent end as they would.

        Args:
            uncounted: returns the tokens that the request has used and that are not counted yet.

        Raises:
            BudgetSpent: one is spent.
        """
        if key is None or (key.day_tokens is None and key.month_tokens is None):
            return
        if self._file is None:
            raise BudgetSpent(
                f"This key has a budget of tokens, and the gateway counts none: {HOW_TO_COUNT}.",
                retry_after_s=3600,
            )
        self._budgeted.add(key.id)
        for budget in self.budgets(key):
            if budget["used"] >= budget["tokens"]:
                resets = datetime.fromisoformat(budget["resets_at"])
                raise BudgetSpent(
                    f"This key has used {budget['used']} of the {budget['tokens']} tokens that it may use a "
                    f"{budget['period']}; it may go on at {budget['resets_at']}.",
                    retry_after_s=max(1, math.ceil(resets.timestamp() - self._wall())),
                    fields={"budget": budget},
                )
        self._running[key.id][request_id] = uncounted

    def end(self, key: str, request_id: str) -> None:
        """Watch a request no longer; what it used was counted."""
        if key in self._running:
            self._running[key].pop(request_id, None)
            if not self._running[key]:
                del self._running[key]

    def budgets(self, key: StoredKey) -> list[dict[str, Any]]:
        """Return the budgets of a key, with what is used of each, and when it begins anew."""
        now = self._now
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        next_month = (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
        running = sum(uncounted() for uncounted in self._running.get(key.id, {}).values())
        told = []
        for period, tokens, begins, resets in (
            ("day", key.day_tokens, self.today, midnight + timedelta(days=1)),
            ("month", key.month_tokens, self.today[:7], next_month),
        ):
            if tokens is not None:
                used = running + self._used(key.id, begins)
                resets_at = resets.isoformat().replace("+00:00", "Z")
                told.append({"period": period, "tokens": tokens, "used": used, "resets_at": resets_at})
        return told

    def _used(self, key: str, begins: str) -> int:
        """Add up a key's tokens of the days that begin with a text."""
        both = (self._known.get(key, Counter()), self._fresh.get(key, Counter()))
        return sum(tokens for each in both for day, tokens in each.items() if day.startswith(begins))

    async def rows(self, asked: Asked) -> list[dict[str, Any]]:
        """Return rows of usage, with all that this gateway has counted so far.

        Raises:
            UsageUnavailable: the file cannot be read, or what was counted last cannot be written.
        """
        if self._file is None:
            return []
        try:
            async with self._turn:
                await self._write()
                return await in_own_thread(self._file.rows, asked)
        except sqlite3.Error:
            raise UsageUnavailable(retry_after_s=5) from None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write what is counted while inside, and the rest at the end."""
        if self._file is None:
            yield
            return
        task = asyncio.create_task(self._keep_writing(), name="usage")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with self._turn:
                with contextlib.suppress(sqlite3.Error):  # logged
                    await self._write()
            await in_own_thread(self._file.close)

    async def _keep_writing(self) -> None:
        while True:
            await self._new.wait()
            try:
                async with self._turn:
                    await self._write()
                await asyncio.sleep(PAUSE_S)
            except Exception as error:  # the border of a background task, which goes on
                if not isinstance(error, sqlite3.Error):
                    log.error("usage_failed", exc_info=error)
                await asyncio.sleep(RETRY_S)

    async def _write(self) -> None:
        """Write what has been counted; the caller holds the turn. To the end also where it is cancelled.

        Raises:
            sqlite3.Error: it could not be; it is kept, and written later.
        """
        work = asyncio.ensure_future(self._written())
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.gather(work, return_exceptions=True)
            raise

    async def _written(self) -> None:
        assert self._file is not None
        self._new.clear()
        if not self._pending:
            return
        self._writing, self._pending = self._pending, defaultdict(Counter)
        fresh = {key: days.copy() for key, days in self._fresh.items()}
        today = self.today
        keep_days = self._keep_days if today != self._forgot_on else None
        budgeted, self._budgeted = self._budgeted, set()
        try:
            spent = await in_own_thread(
                self._file.add, self._writing, keep_days=keep_days, month=today[:7], keys=budgeted
            )
        except BaseException as error:
            for row, counts in self._writing.items():
                self._pending[row].update(counts)
            self._budgeted |= budgeted
            self._new.set()
            if not self._failed:
                log.error("usage_not_written", cause=str(error))
            self._failed = True
            raise
        finally:
            self._writing = {}
        if self._failed:
            log.info("usage_written_again")
        self._failed, self._forgot_on = False, today
        self._settle(fresh)
        self._known |= spent  # with what other gateways wrote

    def _settle(self, written: Mapping[str, Counter[str]]) -> None:
        """Move tokens that are in the file now, and forget those of other months."""
        month = self.today[:7]
        for key, days in written.items():
            known = self._known.setdefault(key, Counter())
            known.update(days)
            self._known[key] = Counter({day: n for day, n in known.items() if day.startswith(month)})
            self._fresh[key] -= days
            if not self._fresh[key]:
                del self._fresh[key]

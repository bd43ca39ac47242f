"""A part of a scene at an address: few bytes are fetched, the mask is the cut-out file's, lies are found."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from geo.raster.made import UTM, make_card, read_tiff, seen_by_the_model, write_jp2, write_tiff
from geo.sources.hosts import Handler, Host, hosting, left, page, redirect
from geo.sources.ranges import Ranges, processor, whole
from rasterio.windows import Window

from baton_geo.contract import GeoAnswer
from baton_geo.errors import GeoError, RasterTooLarge, SourceFailed, SourceRefused
from baton_geo.inputs import LOOK_BYTES, _ranges
from baton_geo.plugin import GeoProcessor
from baton_geo.raster import open_scene
from baton_geo.raster.messages import SceneRequest, receive, send
from baton_geo.raster.open_scene import ChildHandle, OpenScene
from baton_spool import Naming, make
from training.flood_tiny.predict import SHIPPED

SIDE = 10_980
TILE: int = json.loads((SHIPPED / "config.json").read_text())["baton_geo"]["tile"]
PART = (3000, 4500, 1098, 1098)
"""One per cent of the scene."""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Cloud Optimized GeoTIFF of 10,980 x 10,980 pixels and six bands whose blocks differ."""
    path = tmp_path_factory.mktemp("big") / "scene.tif"
    random = np.random.default_rng(3)
    noise = random.integers(0, 16, (6, 512, 512)).astype("int16")
    profile = {"width": SIDE, "height": SIDE, "count": 6, "dtype": "int16", "crs": UTM, "tiled": True}
    profile |= {"transform": rasterio.Affine(10, 0, 600_000, 0, -10, 5_000_000), "compress": "zstd"}
    with rasterio.open(
        path, "w", driver="GTiff", blockxsize=512, blockysize=512, zstd_level=1, nodata=-9999, **profile
    ) as file:
        for top in range(0, SIDE, 512):
            for left in range(0, SIDE, 512):
                width, height = min(512, SIDE - left), min(512, SIDE - top)
                level = np.int16(200 + (left * 7 + top * 3) % 3000)
                file.write(noise[:, :height, :width] * 40 + level, window=Window(left, top, width, height))
        file.descriptions = ("BLUE", "GREEN", "RED", "NIR_NARROW", "SWIR_1", "SWIR_2")
    return path


def cut(path: Path, target: Path, window: tuple[int, int, int, int] = PART) -> Path:
    """A file of a part alone."""
    with rasterio.open(path) as file:
        part = Window(*window)
        pixels = file.read(window=part)
        a, _, x, _, e, y = file.transform[:6]
        names = file.descriptions
        transform = rasterio.Affine(a, 0, x + a * window[0], 0, e, y + e * window[1])
        return write_tiff(target, pixels, names, transform=transform, nodata=file.nodata)


def model(prompt: dict[str, Any]) -> Any:
    """Says water where the first band is below its mean, as an engine's output."""
    first = seen_by_the_model(prompt, (6, 1, TILE, TILE))[:, 0, 0]
    scores = torch.stack([first, -first], dim=1)
    return SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=SimpleNamespace(data=scores))


def answer(plugin: GeoProcessor, data: dict[str, Any]) -> GeoAnswer:
    prompts = plugin.pre_process(plugin.parse_data(data))
    return plugin.post_process([model(prompt) for prompt in prompts])


def mask_of(answered: GeoAnswer, folder: Path) -> Any:
    path = folder / f"mask-{secrets.token_hex(4)}.tif"
    path.write_bytes(base64.b64decode(answered.data))
    return read_tiff(path)[0]


@contextmanager
def serving(folder: Path, path: Path, **settings: Any) -> Iterator[tuple[Host, Ranges, GeoProcessor]]:
    spool = folder / "spool"
    spool.mkdir(exist_ok=True)
    with hosting() as host:
        ranges = Ranges(path)
        host.pages["/scene.tif"] = ranges
        with closing(processor(spool, host, **settings)) as plugin:
            yield host, ranges, plugin
        assert left(spool) == [], "nothing is left"


def at(host: Host, name: str = "/scene.tif") -> dict[str, Any]:
    return {"data": f"http://127.0.0.1:{host.port}{name}", "data_format": "url"}


def local(path: Path) -> dict[str, Any]:
    return {"data": base64.b64encode(path.read_bytes()).decode(), "data_format": "b64_json"}


@pytest.mark.timeout(300)
def test_a_part_costs_few_bytes_and_is_the_cut_out_files(big: Path, tmp_path: Path) -> None:
    """One per cent of the pixels: below five per cent of the bytes; the mask and its place are the same."""
    with serving(tmp_path, big) as (host, ranges, plugin):
        answered = answer(plugin, at(host) | {"window": PART})
        assert ranges.sent < 0.05 * big.stat().st_size
        assert answered.fetched is not None
        assert (answered.fetched.bytes, answered.fetched.of) == (ranges.sent, big.stat().st_size)
        assert answered.fetched.requests == len(ranges.asked) < 40
        assert answered.window == PART
        expected = answer(plugin, local(cut(big, tmp_path / "cut.tif")))
    assert (answered.crs, answered.transform) == (expected.crs, expected.transform)
    assert answered.classes == expected.classes
    assert 0 < answered.classes[1].share < 1
    np.testing.assert_array_equal(mask_of(answered, tmp_path), mask_of(expected, tmp_path))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scene of 1,600 x 1,500 pixels, larger than what is fetched at first."""
    pixels = np.random.default_rng(2).integers(0, 3000, (6, 1500, 1600)).astype("int16")
    return write_tiff(
        tmp_path_factory.mktemp("scene") / "s.tif", pixels, tiled=True, blockxsize=256, blockysize=256
    )


BOXES: list[tuple[dict[str, Any], tuple[int, int, int, int]]] = [
    (
        {"bbox": [505_000.0, 4_989_000.0, 509_000.0, 4_994_000.0], "bbox_crs": "EPSG:32633"},
        (500, 600, 400, 500),
    ),
    ({"bbox": [0.0, 4_999_000.0, 501_000.0, 9_000_000.0], "bbox_crs": "EPSG:32633"}, (0, 0, 100, 100)),
    ({"window": [17, 33, 700, 299]}, (17, 33, 700, 299)),
]


@pytest.mark.parametrize(("part", "window"), BOXES)
def test_a_box_is_the_pixels_it_touches(
    scene: Path, tmp_path: Path, part: dict[str, Any], window: tuple[int, int, int, int]
) -> None:
    """In the scene's own CRS; cut to the scene where it reaches beyond. Of a local file as of a remote one."""
    with serving(tmp_path, scene) as (host, _, plugin):
        remote, here = answer(plugin, at(host) | part), answer(plugin, local(scene) | part)
        expected = answer(plugin, local(cut(scene, tmp_path / "cut.tif", window)))
    for answered in (remote, here):
        assert answered.window == window
        assert answered.transform == expected.transform
        np.testing.assert_array_equal(mask_of(answered, tmp_path), mask_of(expected, tmp_path))


@pytest.fixture(scope="module")
def jp2(scene: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same scene in JPEG 2000."""
    path = tmp_path_factory.mktemp("jp2") / "s.jp2"
    return write_jp2(path, np.abs(read_tiff(scene)), blockxsize=256, blockysize=256)


def test_a_jpeg_2000_file_is_fetched_whole(jp2: Path, tmp_path: Path) -> None:
    """Its tiles are in no order that its header tells; a part of it is what it is of the same file here."""
    part = {"window": [200, 250, 300, 310]}
    with serving(tmp_path, jp2) as (host, ranges, plugin):
        answered, here = answer(plugin, at(host) | part), answer(plugin, local(jp2) | part)
        assert answered.fetched is not None
        assert answered.fetched.bytes == ranges.sent == jp2.stat().st_size
    assert (answered.data, answered.transform) == (here.data, here.transform)


@pytest.mark.fault("F18")
def test_a_jpeg_2000_file_is_fetched_within_the_limits(jp2: Path, tmp_path: Path) -> None:
    """Nothing but its beginning where it is too large, or its header says that it is of no use."""
    with serving(tmp_path, jp2, limits={"file_bytes": jp2.stat().st_size // 2}) as (host, ranges, plugin):
        with pytest.raises(RasterTooLarge, match="bytes; at most"):
            answer(plugin, at(host) | {"window": [0, 0, 300, 300]})
        assert ranges.sent <= LOOK_BYTES
    with serving(tmp_path, jp2, limits={"block_bytes": 1000}) as (host, ranges, plugin):
        with pytest.raises(RasterTooLarge, match="rewrite it with tiles"):
            answer(plugin, at(host) | {"window": [0, 0, 300, 300]})
        assert ranges.sent <= LOOK_BYTES


@pytest.mark.fault("F17")
@pytest.mark.parametrize("lie", [0, 1, 3, 4, 5, 7])
def test_a_host_that_lies_about_a_range_of_jpeg_2000_is_found_out(
    jp2: Path, tmp_path: Path, lie: int
) -> None:
    """As below."""
    lies, kind, says = LIES[lie]
    with serving(tmp_path, jp2) as (host, ranges, plugin):
        ranges.lie = lies
        with pytest.raises(kind, match=says):
            answer(plugin, at(host) | {"window": [600, 600, 300, 300]})


def test_a_host_without_ranges_sends_the_whole_file(scene: Path, tmp_path: Path) -> None:
    """Within the limit on files, and then nothing is said of ranges."""
    with serving(tmp_path, scene) as (host, _, plugin):
        by_ranges = answer(plugin, at(host) | {"window": [0, 0, 300, 300]})
        host.pages["/scene.tif"] = whole(scene)
        answered = answer(plugin, at(host) | {"window": [0, 0, 300, 300]})
    assert (answered.data, answered.fetched) == (by_ranges.data, None)


def other_place(ranges: Ranges, handler: Handler, begin: int, end: int) -> bool:
    size = ranges.path.stat().st_size
    ranges.send(handler, begin, end, content_range=f"bytes {begin + 4096}-{end + 4095}/{size}")
    return True


def other_size(ranges: Ranges, handler: Handler, begin: int, end: int) -> bool:
    ranges.send(
        handler, begin, end, content_range=f"bytes {begin}-{end - 1}/{ranges.path.stat().st_size + 1}"
    )
    return True


def no_place(ranges: Ranges, handler: Handler, begin: int, end: int) -> bool:
    ranges.send(handler, begin, end, content_range="bytes */*")
    return True


def changed(ranges: Ranges, handler: Handler, begin: int, end: int) -> bool:
    ranges.send(handler, begin, end, etag='"two"')
    return True


def shorter(ranges: Ranges, handler: Handler, begin: int, end: int) -> bool:
    size = ranges.path.stat().st_size
    page(b"\0" * (end - begin - 1), 206, content_range=f"bytes {begin}-{end - 1}/{size}", etag=ranges.etag)(
        handler
    )
    return True


def endless(ranges: Ranges, handler: Handler, begin: int, end: int) -> bool:
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {begin}-{end - 1}/{ranges.path.stat().st_size}")
    handler.send_header("ETag", ranges.etag)
    handler.end_headers()
    while True:
        handler.wfile.write(b"\0" * 65536)


def no_range(ranges: Ranges, handler: Handler, begin: int, end: int) -> bool:
    page(b"\0" * 100)(handler)
    return True


def elsewhere(ranges: Ranges, handler: Handler, begin: int, end: int) -> bool:
    redirect("http://127.0.0.2/scene.tif")(handler)
    return True


LIES: list[tuple[Any, type[GeoError], str]] = [
    (other_place, SourceFailed, "another range"),
    (other_size, SourceFailed, "changed while it was read"),
    (no_place, SourceFailed, "does not say which"),
    (changed, SourceFailed, "changed while it was read"),
    (shorter, SourceFailed, "broke off|fewer bytes"),
    (endless, SourceFailed, "more or fewer bytes"),
    (no_range, SourceFailed, "no range"),
    (elsewhere, SourceRefused, "not one this server fetches from"),
]


@pytest.mark.fault("F17")
@pytest.mark.parametrize(("lie", "kind", "says"), LIES)
def test_a_host_that_lies_about_a_range_is_found_out(
    scene: Path, tmp_path: Path, lie: Callable[..., bool], kind: type[GeoError], says: str
) -> None:
    """The request fails in words, with no file left; no byte of another place or version is used."""
    with serving(tmp_path, scene) as (host, ranges, plugin):
        ranges.lie = lie
        with pytest.raises(kind, match=says) as caught:
            answer(plugin, at(host) | {"window": [600, 600, 300, 300]})
        assert caught.value.message.startswith("data.data: ")


@pytest.mark.fault("F18")
def test_what_is_fetched_by_ranges_is_limited(scene: Path, tmp_path: Path) -> None:
    """`limits.file_bytes` counts what is fetched, whatever the size of the file."""
    limits = {"file_bytes": scene.stat().st_size // 4}
    with serving(tmp_path, scene, limits=limits) as (host, ranges, plugin):
        assert answer(plugin, at(host) | {"window": [300, 300, 128, 128]}).width == 128
        with pytest.raises(RasterTooLarge, match="the most this server takes"):
            answer(plugin, at(host) | {"window": [0, 0, 1600, 1500]})
        assert ranges.sent < 2 * limits["file_bytes"]


@pytest.mark.fault("F19")
@pytest.mark.timeout(60)
async def test_a_closed_scene_ends_its_fetch(scene: Path, tmp_path: Path) -> None:
    """Its client is gone: a host that does not answer for ten minutes holds nothing up."""
    reached, hold = threading.Event(), threading.Event()

    def silent(_ranges: Ranges, _handler: Handler, _begin: int, _end: int) -> bool:
        reached.set()
        return hold.wait(30)

    with serving(tmp_path, scene, fetch_seconds=600) as (host, ranges, plugin):
        request = plugin.parse_data(at(host) | {"window": [600, 600, 300, 300]})
        ranges.lie = silent
        task = asyncio.ensure_future(plugin.pre_process_async(request, "r"))
        assert await asyncio.to_thread(reached.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        hold.set()


@pytest.mark.fault("F18")
@pytest.mark.timeout(60)
async def test_a_slow_host_holds_up_no_file_that_is_here(scene: Path, tmp_path: Path) -> None:
    """As many openings as there are processors wait for it: a file of the request opens beside them."""
    reached, hold = threading.Semaphore(0), threading.Event()

    def silent(_ranges: Ranges, _handler: Handler, _begin: int, _end: int) -> bool:
        reached.release()
        return hold.wait(30)

    many = len(os.sched_getaffinity(0))
    with serving(tmp_path, scene, fetch_seconds=600, decoders=2 * many + 2) as (host, ranges, plugin):
        request = plugin.parse_data(at(host) | {"window": [600, 600, 300, 300]})
        ranges.lie = silent
        tasks = []
        for number in range(many):
            tasks.append(asyncio.ensure_future(plugin.pre_process_async(request, f"r{number}")))
            ranges.asked.clear()  # the first range of each is answered
            assert await asyncio.to_thread(reached.acquire, timeout=20)
        here = plugin.parse_data(local(scene) | {"window": [0, 0, 300, 300]})
        async with asyncio.timeout(30):
            prompts = await plugin.pre_process_async(here, "here")
        await prompts.aclose()  # type: ignore[attr-defined]
        plugin.forget("here")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        hold.set()


@pytest.mark.fault("F18")
def test_what_an_opening_fetches_is_limited_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it has to ask: of `fetch_seconds` each range leaves the next ones less."""
    late, left_each = [0.0], list[float]()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0])
    monkeypatch.setattr(open_scene, "time", clock)

    class Slow:
        opening_seconds = 30.0

        def fetch(self, need: object, deadline: float) -> None:
            left_each.append(deadline - clock.monotonic())
            if left_each[-1] <= 0:
                raise SourceFailed("too slow")
            late[0] += 12

        def stop(self) -> None:
            """Nothing runs."""

    ours, child = socket.socketpair()
    lifeline, other_end = socket.socketpair()

    def ask() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:  # first it is asked to open
                receive(child, lambda _: memoryview(b""))
                send(child, {"need": [[0, [[1, 1]]]]})

    asking = threading.Thread(target=ask)
    asking.start()
    folder = make(tmp_path, Naming("scene-", folders=True))
    scene_ = OpenScene(
        ChildHandle(ours, lifeline), folder, SceneRequest(card=make_card()), lambda: None, Slow()
    )
    with child, other_end, closing(scene_):
        with pytest.raises(SourceFailed, match="too slow"):
            scene_.begin()
        other_end.sendall(b"\0" * 4)
        asking.join()
    assert left_each == pytest.approx([30, 18, 6, -6], abs=5)


ODD: list[Any] = [
    None,
    {},
    [[0]],
    [["a", 1]],
    [[-1, 1]],
    [[0, 0]],
    [[0, 10**6]],
    [[3, 2]],
    [[0, 1]] * 100_001,
]


@pytest.mark.fault("F17")
@pytest.mark.parametrize("pages", ODD)
def test_a_process_that_asks_for_what_is_not_there_gets_nothing(pages: Any) -> None:
    """It may have been taken over by a raster: nothing is fetched for pages that the file does not have."""
    with pytest.raises((ValueError, TypeError)):
        _ranges(pages, 4 * 4096 + 1 if pages != [[3, 2]] else 4 * 4096)


def test_neighbouring_pages_are_fetched_together() -> None:
    """What lies close is one request; what is very long is several; the file's end is its last byte."""
    assert _ranges([[0, 1], [5, 1], [100, 1]], 10**6) == [(0, 6 * 4096), (100 * 4096, 101 * 4096)]
    assert _ranges([[0, 3]], 2 * 4096 + 5) == [(0, 2 * 4096 + 5)]
    parts = _ranges([[0, 2500]], 2500 * 4096)
    assert [end - begin for begin, end in parts] == [1024 * 4096, 1024 * 4096, 452 * 4096]

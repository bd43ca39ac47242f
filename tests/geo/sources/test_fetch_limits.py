"""Hosts that are slow, endless, broken or absent cost a fetch its time and size, and leave nothing."""

from __future__ import annotations

import asyncio
import gzip
import time

import pytest
from geo.sources.fetching import NAME, Setup, at_url
from geo.sources.hosts import RASTER, Handler, Page, left, page, redirect, settings

from baton_geo.errors import RasterTooLarge, SourceFailed
from baton_geo.sources import Sources


def drip(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"II*\0")
        time.sleep(0.02)


def drip_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        handler.wfile.write(b"x: y\r\n")
        time.sleep(0.02)


def silent(handler: Handler) -> None:
    time.sleep(30)


def crawl(handler: Handler) -> None:
    time.sleep(0.15)
    redirect("/scene.tif?again")(handler)


@pytest.mark.fault("F6")
@pytest.mark.parametrize("slow", [drip, drip_headers, silent, crawl])
def test_a_slow_host_is_left_at_the_time_limit(at: Setup, slow: Page) -> None:
    """The cap is on the whole, redirects and all: a drip of bytes must not keep a fetch alive."""
    at.good.pages["/scene.tif"] = slow
    start = time.perf_counter()
    error = at.refuse(fetch_seconds=0.5)
    assert time.perf_counter() - start < 10
    assert (type(error), error.status) == (SourceFailed, 422)
    assert "longer than 0.5 s" in error.message


@pytest.mark.fault("F6")
async def test_a_hanging_resolver_is_left_at_the_time_limit(at: Setup) -> None:
    """Resolving counts as fetching."""

    async def hang(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    sources = Sources(settings(at.spool, f"{NAME}:80", fetch_seconds=0.2), resolver=hang)
    with pytest.raises(SourceFailed, match="longer than"):
        await sources.open(at_url(f"http://{NAME}:80/"))
    assert left(at.spool) == []


def endless(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(bytes(1 << 20))


@pytest.mark.fault("F6")
def test_a_body_is_cut_off_at_the_size_limit(at: Setup) -> None:
    """A host that announces no size and sends without end must be cut off at the cap."""
    at.good.pages["/scene.tif"] = endless
    error = at.refuse(limits={"file_bytes": 3 << 20})
    assert (type(error), error.status) == (RasterTooLarge, 413)
    assert "3 MiB" in error.message


def test_an_announced_size_over_the_cap_is_refused_at_once(at: Setup) -> None:
    """A body that is said to be too large must not be read at all."""
    at.good.pages["/scene.tif"] = page(b"II*\0", content_length=str(10**12))
    assert isinstance(at.refuse(), RasterTooLarge)


@pytest.mark.fault("F6")
def test_compressed_bodies_are_refused(at: Setup) -> None:
    """A gzip bomb must be left as it came: 10 MB of zeros in 10 kB are not unpacked."""
    at.good.pages["/scene.tif"] = page(gzip.compress(bytes(10_000_000)), content_encoding="gzip")
    assert "compressed" in at.refuse(limits={"file_bytes": 1 << 20}).message


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (page(b"no", 404), "answered 404"),
        (page(b"no", 500), "answered 500"),
        (page(b"part", 206), "answered 206"),
        (page(b"", 304), "answered 304"),
        (page(b"", 302), "does not say where to"),
        (page(b"", 302, location="http://[::1"), "not an address"),
        (page(RASTER, content_length=str(len(RASTER) + 9)), "broke off"),
        (lambda handler: handler.wfile.write(b"SSH-2.0-x\r\n\r\n"), "does not speak HTTP"),
        (lambda handler: handler.connection.close(), "broke off"),
    ],
)
def test_hosts_that_fail_are_said_to(at: Setup, answer: Page, said: str) -> None:
    """A host's fault must be a 422 that names it, and leave no file."""
    at.good.pages["/scene.tif"] = answer
    error = at.refuse()
    assert error.status in (422, 400)
    assert said in error.message


async def test_a_host_that_is_not_there(at: Setup) -> None:
    """A name nobody knows, and a port nobody listens on, must each be a 422 that says which."""
    sources = at.sources("nobody.example.org", "127.0.0.1:9")
    with pytest.raises(SourceFailed, match="could not be resolved"):
        await sources.open(at_url("http://nobody.example.org/"))
    with pytest.raises(SourceFailed, match="no connection"):
        await sources.open(at_url("http://127.0.0.1:9/"))


async def test_a_cancelled_fetch_leaves_nothing(at: Setup) -> None:
    """When the client is gone, the connection must be closed and the file removed."""
    at.good.pages["/scene.tif"] = endless
    task = asyncio.create_task(at.sources().open(at_url(at.url)))
    async with asyncio.timeout(10):
        while not any(entry.stat().st_size for entry in at.spool.iterdir()):  # noqa: ASYNC110 - a folder
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left(at.spool) == []

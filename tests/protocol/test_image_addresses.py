"""Images by URL: fetched from the allowed hosts alone, by the gateway and never by the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from geo.sources.hosts import Handler, Host, Names, hosting, page, redirect
from support.gateways import FakeGateway, run_fake
from support.image_requests import LOOKS, PNG, URL, block, chat, post, refused, seen

from baton.config.groups import ImageSettings
from baton.engines.fake.engine import FakeEngine
from baton.errors import ImageFetchFailed, SettingsError
from baton.images.reader import fetcher_of


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """One model that takes three images, one that takes text only."""
    with run_fake(FakeEngine("look", images=LOOKS), FakeEngine("text")) as running:
        yield running


NAME = "pictures.example.org"


@pytest.fixture
def host() -> Iterator[Host]:
    with hosting() as running:
        running.pages = {"/a.png": page(PNG), "/far": redirect("http://169.254.169.254/latest/meta-data")}
        yield running


@pytest.fixture
def open_gateway(host: Host) -> Iterator[FakeGateway]:
    """It may fetch from one host on loopback, named by its address."""
    images = {"allowed_hosts": (f"127.0.0.1:{host.port}",), "allow_http": True, "file_bytes": 4096}
    with run_fake(FakeEngine("look", images=LOOKS), FakeEngine("text"), images=images) as running:
        yield running


def test_an_allowed_address_is_fetched_by_us_and_never_by_the_engine(
    open_gateway: FakeGateway, host: Host
) -> None:
    """What the engine gets is the same as if the client had sent the bytes."""
    at = f"http://127.0.0.1:{host.port}/a.png"
    assert post(open_gateway, chat({"type": "image_url", "image_url": {"url": at}})).status_code == 200
    assert seen(open_gateway)["messages"][0]["content"][0]["image_url"] == {"url": URL}
    assert post(open_gateway, chat(block(type="url", url=at)), "/v1/messages").status_code == 200
    assert seen(open_gateway)["messages"][0]["content"][0]["source"]["media_type"] == "image/png"
    assert host.connects == 2
    assert "Cookie" not in host.asked[0][1]


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        ("/missing", "image_fetch_failed", "answered 404"),
        ("/far", "invalid_request", "a redirect leads there"),
        ("/large", "image_too_large", "4096 bytes"),
        ("/endless", "image_too_large", "4096 bytes"),
        ("/text", "invalid_image", "no PNG"),
    ],
)
def test_what_cannot_be_fetched_is_said(
    open_gateway: FakeGateway, host: Host, path: str, code: str, said: str
) -> None:
    """The place, and what the host did; nothing reaches the engine."""

    def endless(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(1000):
            handler.wfile.write(bytes(1 << 16))

    host.pages |= {"/large": page(bytes(5000)), "/endless": endless, "/text": page(b"hello")}
    error = refused(open_gateway, chat({"image_url": f"http://127.0.0.1:{host.port}{path}"}))
    assert (error["code"], error["param"]) == (code, "messages[0].content[0].image_url")
    assert said in error["message"]


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://localhost/a.png",
        "file:///etc/passwd",
        " HTTP://example.com/a.png",
        "ftp://example.com/a.png",
        "//example.com/a.png",
        "javascript:alert(1)",
        "blob:x",
    ],
)
def test_no_other_address_is_fetched(gateway: FakeGateway, open_gateway: FakeGateway, url: str) -> None:
    """With a list of hosts and without one, in any of the forms."""
    for running in (gateway, open_gateway):
        for body, path in (
            (chat({"type": "image_url", "image_url": {"url": url}}), "/v1/chat/completions"),
            (chat({"type": "image_url", "image_url": {"url": url}}), "/tokenize"),
            (chat(block(type="url", url=url)), "/v1/messages"),
            (
                {
                    "model": "look",
                    "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
                },
                "/v1/responses",
            ),
        ):
            assert refused(running, body, path)["code"] == "invalid_request"


async def test_a_host_that_hangs_costs_its_time_and_no_more(host: Host) -> None:
    """`images.fetch_s` is for all of it."""
    host.pages["/a.png"] = lambda _handler: time.sleep(2)
    settings = ImageSettings(
        allowed_hosts=(f"{NAME}:{host.port}", f"127.0.0.1:{host.port}"), allow_http=True, fetch_s=0.2
    )
    fetch = fetcher_of(settings, Names({NAME: [["127.0.0.1"]]}))
    with pytest.raises(ImageFetchFailed, match=r"messages.*longer than 0.2 s"):
        await fetch(f"http://{NAME}:{host.port}/a.png", "messages")


def test_a_list_that_holds_no_hosts_stops_the_start() -> None:
    """The operator's mistake shows before a client wonders."""
    with pytest.raises(SettingsError, match=r"images\.allowed_hosts"):
        fetcher_of(ImageSettings(allowed_hosts=("https://example.org",)))

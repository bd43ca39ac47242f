"""Fetching from real hosts: pinned to the address that was checked, capped, and never led astray."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from geo.sources.hosts import RASTER, Handler, Host, Names, Page, hosting, left, page, redirect, settings

from baton_geo.errors import GeoError, RasterTooLarge, SourceFailed, SourceRefused
from baton_geo.fetch import Fetcher, system_resolver

NAME = "rasters.example.org"


class Setup:
    """A host the operator allows, and a trap on the same port of another address, which nobody allows."""

    def __init__(self, good: Host, trap: Host, spool: Path) -> None:
        self.good = good
        self.trap = trap
        self.spool = spool
        self.names = Names({NAME: [["127.0.0.1"]]})
        self.url = f"http://{NAME}:{good.port}/scene.tif"

    def fetcher(self, *hosts: str, **more: Any) -> Fetcher:
        port = self.good.port
        allowed = hosts or (f"{NAME}:{port}", f"127.0.0.1:{port}")
        return Fetcher(settings(self.spool, *allowed, **more), resolver=self.names)

    def fetch(self, url: str | None = None, **more: Any) -> bytes:
        with asyncio.run(self.fetcher(**more).fetch(url or self.url)) as spooled:
            found = spooled.path.read_bytes()
            assert len(found) == spooled.size
        assert left(self.spool) == []
        return found

    def refuse(self, url: str | None = None, **more: Any) -> GeoError:
        with pytest.raises(GeoError) as caught:
            asyncio.run(self.fetcher(**more).fetch(url or self.url))
        assert left(self.spool) == []
        return caught.value


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Setup]:
    with hosting() as good, hosting("127.0.0.2", good.port) as trap:
        yield Setup(good, trap, tmp_path / "spool")


def test_a_file_arrives_whole(at: Setup) -> None:
    """What the host sends must be what is on disk; the host must see its own name and nothing of ours."""
    assert at.fetch(at.url + "?sig=a%2Fb&x=[1]") == RASTER
    path, headers = at.good.asked[0]
    assert path.startswith("/scene.tif?sig=a%2Fb&x=")
    assert headers["Host"] == f"{NAME}:{at.good.port}"
    assert headers["Accept-Encoding"] == "identity"
    assert set(headers) == {"Host", "Accept", "Accept-Encoding", "User-Agent", "Connection"}


def test_an_ip_address_in_the_list_needs_no_resolver(at: Setup) -> None:
    """A listed IP address must be fetched from as it stands."""
    assert at.fetch(f"http://127.0.0.1:{at.good.port}/scene.tif") == RASTER
    assert at.names.asked == []


def test_many_at_once_get_their_own(at: Setup) -> None:
    """Twenty fetches at a time, each must get its own file."""
    for i in range(20):
        at.good.pages[f"/{i}"] = page(b"%d," % i * 50_000)

    async def fetch_all() -> list[bytes]:
        fetcher = at.fetcher()
        urls = [f"http://{NAME}:{at.good.port}/{i}" for i in range(20)]
        found = []
        for spooled in await asyncio.gather(*map(fetcher.fetch, urls)):
            with spooled:
                found.append(spooled.path.read_bytes())
        return found

    assert asyncio.run(fetch_all()) == [b"%d," % i * 50_000 for i in range(20)]
    assert left(at.spool) == []


def test_from_synchronous_code(at: Setup) -> None:
    """Plain vLLM's hooks are synchronous and run inside its event loop; both ways must work."""

    async def inside_a_loop() -> bytes:
        with at.fetcher().fetch_sync(at.url) as spooled:
            return spooled.path.read_bytes()

    assert asyncio.run(inside_a_loop()) == RASTER
    with at.fetcher().fetch_sync(at.url) as spooled:
        assert spooled.path.read_bytes() == RASTER
    with pytest.raises(SourceFailed, match="404"):
        at.fetcher().fetch_sync(at.url + "x")
    assert left(at.spool) == []


def trapped(port: int) -> list[str]:
    """Ways to write the trap's address, 127.0.0.2, that some client or other would follow."""
    return [
        f"http://127.0.0.2:{port}/scene.tif",
        f"http://2130706434:{port}/scene.tif",
        f"http://0x7f000002:{port}/scene.tif",
        f"http://0177.0.0.2:{port}/scene.tif",
        f"http://0x7f.0.0.2:{port}/scene.tif",
        f"http://127.2:{port}/scene.tif",
        f"http://[::ffff:127.0.0.2]:{port}/scene.tif",
        f"http://[::ffff:7f00:2]:{port}/scene.tif",
        f"http://[fe80::1%25lo]:{port}/scene.tif",
        f"http://localhost:{port}/scene.tif",
        f"http://{NAME}:{port}@127.0.0.2:{port}/scene.tif",
        f"http://127.0.0.2:{port}\\@{NAME}:{port}/scene.tif",
        f"http://a\\@{NAME}:{port}/scene.tif",
        f"http://127.0.0.2:{port}#@{NAME}:{port}/scene.tif",
        f"http://127.0.0.2:{port}?@{NAME}:{port}/scene.tif",
        f"http://\uff11\uff12\uff17.0.0.2:{port}/scene.tif",
        f"http://127\u30020\u30020\u30022:{port}/scene.tif",
        f"gopher://127.0.0.2:{port}/_GET%20/scene.tif",
        f"ftp://127.0.0.2:{port}/scene.tif",
        f"https://127.0.0.2:{port}/scene.tif",
        f"//127.0.0.2:{port}/scene.tif",
        "file:///etc/passwd",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/",
    ]


def test_f6_no_spelling_of_a_forbidden_host_connects(at: Setup) -> None:
    """Every spelling must be a 400; connections made: 0, names resolved: 0."""
    for url in trapped(at.good.port):
        error = at.refuse(url)
        assert (type(error), error.status) == (SourceRefused, 400), url
    assert (at.trap.connects, at.good.connects, at.names.asked) == (0, 0, [])


def test_f6_redirects_are_checked_from_scratch(at: Setup) -> None:
    """A redirect of an allowed host to each of these must be a 400; connections to the trap: 0."""
    for url in trapped(at.good.port):
        location = url.encode("utf-8").decode("latin-1")
        at.good.pages["/scene.tif"] = redirect(location)
        error = at.refuse()
        assert (type(error), error.status) == (SourceRefused, 400), url
    assert at.trap.connects == 0
    assert at.good.connects == len(trapped(at.good.port))


def test_f6_a_redirect_says_it_was_one(at: Setup) -> None:
    """The client wrote an allowed address; the message must say that a redirect left it."""
    at.good.pages["/scene.tif"] = redirect(f"http://127.0.0.2:{at.good.port}/scene.tif")
    assert "redirect" in at.refuse().message


def test_redirects_within_the_list_are_followed(at: Setup) -> None:
    """Absolute and relative redirects to allowed hosts must be followed, without cookies on the way."""
    at.good.pages["/a"] = redirect("b?c=1", set_cookie="secret=1")
    at.good.pages["/b"] = redirect(at.url, set_cookie="secret=2")
    assert at.fetch(f"http://{NAME}:{at.good.port}/a") == RASTER
    assert [path for path, _ in at.good.asked] == ["/a", "/b?c=1", "/scene.tif"]
    assert not any("Cookie" in headers for _, headers in at.good.asked)


def test_f6_redirects_end(at: Setup) -> None:
    """A host that redirects for ever must be left after five redirects."""
    at.good.pages["/scene.tif"] = redirect("/scene.tif")
    assert "more than 5 redirects" in at.refuse().message
    assert at.good.connects == 6


@pytest.mark.parametrize(
    "answers",
    [
        ["127.0.0.2"],
        ["127.0.0.1", "127.0.0.2"],
        ["127.0.0.2", "127.0.0.1"],
        ["::ffff:127.0.0.1"],
        ["0.0.0.0"],
    ],
)
def test_f6_a_name_that_leads_inside_is_refused(at: Setup, answers: list[str]) -> None:
    """One address that is neither public nor listed must spoil the name; connections made: 0."""
    at.names.table[NAME] = [answers]
    error = at.refuse()
    assert (type(error), error.status) == (SourceRefused, 400)
    assert "127.0.0" not in error.message
    assert (at.trap.connects, at.good.connects) == (0, 0)


def test_f6_dns_rebinding_finds_nothing(at: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name must be resolved once, by us: a second answer that leads to the trap is never asked for."""
    at.names.table[NAME] = [["127.0.0.1"], ["127.0.0.2"]]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_args, **_kinds: pytest.fail("resolved behind our back")
    )
    monkeypatch.setattr(socket, "gethostbyname", lambda _name: pytest.fail("resolved behind our back"))
    assert at.fetch() == RASTER
    assert at.names.asked == [NAME]
    assert (at.good.connects, at.trap.connects) == (1, 0)


def test_f6_dns_rebinding_on_a_redirect(at: Setup) -> None:
    """A redirect is resolved anew, and checked anew: one that now leads to the trap must be refused."""
    at.names.table[NAME] = [["127.0.0.1"], ["127.0.0.2"]]
    at.good.pages["/scene.tif"] = redirect("/other.tif")
    assert isinstance(at.refuse(), SourceRefused)
    assert (at.good.connects, at.trap.connects) == (1, 0)


def test_f6_the_machines_own_resolver_is_held_to_the_same(at: Setup) -> None:
    """`localhost`, resolved by the machine itself, must be refused though the operator listed the name."""
    fetcher = Fetcher(settings(at.spool, f"localhost:{at.good.port}"))
    with pytest.raises(SourceRefused, match="not a public one"):
        asyncio.run(fetcher.fetch(f"http://localhost:{at.good.port}/scene.tif"))
    assert at.good.connects == 0
    assert "127.0.0.1" in asyncio.run(system_resolver("localhost", 80))


def test_f6_proxies_of_the_environment_are_not_used(at: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would connect where it likes, and learn the address; none may be used."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.2:{at.trap.port}")
    assert at.fetch() == RASTER
    assert at.trap.connects == 0


def test_the_next_address_is_tried(at: Setup) -> None:
    """Where the first address takes no connection, another of the same answer must serve."""
    at.names.table[NAME] = [["127.0.0.3", "127.0.0.1"]]
    port = at.good.port
    fetcher = at.fetcher(f"{NAME}:{port}", f"127.0.0.3:{port}", f"127.0.0.1:{port}")
    with asyncio.run(fetcher.fetch(at.url)) as spooled:
        assert spooled.path.read_bytes() == RASTER


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
    time.sleep(3)


def crawl(handler: Handler) -> None:
    time.sleep(0.15)
    redirect("/scene.tif?again")(handler)


@pytest.mark.parametrize("slow", [drip, drip_headers, silent, crawl])
def test_f6_a_slow_host_costs_its_time_and_no_more(at: Setup, slow: Page) -> None:
    """The cap is on the whole, redirects and all: a drip of bytes must not keep a fetch alive."""
    at.good.pages["/scene.tif"] = slow
    start = time.perf_counter()
    error = at.refuse(fetch_seconds=0.5)
    assert time.perf_counter() - start < 2
    assert (type(error), error.status) == (SourceFailed, 422)
    assert "longer than 0.5 s" in error.message


def test_f6_a_resolver_that_hangs_costs_its_time_and_no_more(at: Setup) -> None:
    """Resolving counts as fetching."""

    async def hang(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    fetcher = Fetcher(settings(at.spool, f"{NAME}:80", fetch_seconds=0.2), resolver=hang)
    with pytest.raises(SourceFailed, match="longer than"):
        asyncio.run(fetcher.fetch(f"http://{NAME}:80/"))
    assert left(at.spool) == []


def endless(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(bytes(1 << 20))


def test_f6_size_is_counted_not_believed(at: Setup) -> None:
    """A host that announces no size and sends without end must be cut off at the cap."""
    at.good.pages["/scene.tif"] = endless
    error = at.refuse(limits={"file_bytes": 3 << 20})
    assert (type(error), error.status) == (RasterTooLarge, 413)
    assert "3 MiB" in error.message


def test_an_announced_size_over_the_cap_is_refused_at_once(at: Setup) -> None:
    """A body that is said to be too large must not be read at all."""
    at.good.pages["/scene.tif"] = page(b"II*\0", content_length=str(10**12))
    assert isinstance(at.refuse(), RasterTooLarge)


def test_f6_packed_bodies_are_refused(at: Setup) -> None:
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


def test_a_host_that_is_not_there(at: Setup) -> None:
    """A name nobody knows, and a port nobody listens on, must each be a 422 that says which."""
    fetcher = at.fetcher("nobody.example.org", "127.0.0.1:9")
    with pytest.raises(SourceFailed, match="could not be resolved"):
        asyncio.run(fetcher.fetch("http://nobody.example.org/"))
    with pytest.raises(SourceFailed, match="no connection"):
        asyncio.run(fetcher.fetch("http://127.0.0.1:9/"))


def test_a_cancelled_fetch_leaves_nothing(at: Setup) -> None:
    """When the client is gone, the connection must be closed and the file removed."""
    at.good.pages["/scene.tif"] = endless

    async def cancel() -> None:
        task = asyncio.create_task(at.fetcher().fetch(at.url))
        async with asyncio.timeout(10):
            while not any(entry.stat().st_size for entry in at.spool.iterdir()):  # noqa: ASYNC110 - a folder
                await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert left(at.spool) == []

    asyncio.run(cancel())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-made certificate for the name, with its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    made = folder / "both.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-days", "2", "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    made.write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())
    return made


@pytest.fixture
def secure(certificate: Path) -> Iterator[Host]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with hosting(tls=context) as host:
        yield host


def test_f6_tls_asks_for_the_name_at_the_pinned_address(
    secure: Host, certificate: Path, tmp_path: Path
) -> None:
    """Though connected to by number, the host must be asked for its name, in TLS and in HTTP."""
    allowed = (f"*.example.org:{secure.port}", f"127.0.0.1:{secure.port}")
    names = Names({NAME: [["127.0.0.1"]]})
    trust = ssl.create_default_context(cafile=str(certificate))
    fetcher = Fetcher(settings(tmp_path, *allowed, allow_http=False), resolver=names, tls=trust)
    with asyncio.run(fetcher.fetch(f"https://{NAME}:{secure.port}/scene.tif")) as spooled:
        assert spooled.path.read_bytes() == RASTER
    assert secure.names == [NAME]
    assert secure.asked[0][1]["Host"] == f"{NAME}:{secure.port}"


@pytest.mark.parametrize(
    ("host", "trusted"), [("other.example.org", True), ("127.0.0.1", True), (NAME, False)]
)
def test_f6_certificates_are_checked_against_the_name(
    secure: Host, certificate: Path, tmp_path: Path, host: str, trusted: bool
) -> None:
    """A certificate of another name, or of nobody we trust, must be refused before anything is asked."""
    allowed = (f"*.example.org:{secure.port}", f"127.0.0.1:{secure.port}")
    names = Names({NAME: [["127.0.0.1"]], "other.example.org": [["127.0.0.1"]]})
    trust = ssl.create_default_context(cafile=str(certificate)) if trusted else None
    fetcher = Fetcher(settings(tmp_path, *allowed), resolver=names, tls=trust)
    with pytest.raises(SourceFailed, match="certificate is not valid"):
        asyncio.run(fetcher.fetch(f"https://{host}:{secure.port}/scene.tif"))
    assert secure.asked == []


def test_the_operators_mistakes_show_at_the_start(tmp_path: Path) -> None:
    """A list entry that is no host must stop the plugin from being set up."""
    with pytest.raises(ValueError, match=r"baton_geo\.allowed_hosts"):
        Fetcher(settings(tmp_path, "https://example.org"))

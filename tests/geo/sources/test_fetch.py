"""Fetching from real hosts: pinned to the address that was checked, capped, and never led astray."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from geo.sources.fetching import NAME, Setup, at_url
from geo.sources.hosts import RASTER, left, page, redirect, settings

from baton_geo.errors import SourceFailed, SourceRefused
from baton_geo.sources import Sources, system_resolver


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


async def test_many_at_once_get_their_own(at: Setup) -> None:
    """Twenty fetches at a time, each must get its own file."""
    for i in range(20):
        at.good.pages[f"/{i}"] = page(b"%d," % i * 50_000)

    sources = at.sources()
    urls = [f"http://{NAME}:{at.good.port}/{i}" for i in range(20)]
    found = []
    for spooled in await asyncio.gather(*(sources.open(at_url(url)) for url in urls)):
        with spooled:
            found.append(spooled.path.read_bytes())
    assert found == [b"%d," % i * 50_000 for i in range(20)]
    assert left(at.spool) == []


def test_from_synchronous_code(at: Setup) -> None:
    """Plain vLLM's hooks are synchronous and run inside its event loop; both ways must work."""

    async def inside_a_loop() -> bytes:
        with at.sources().open_sync(at_url(at.url)) as spooled:
            return spooled.path.read_bytes()

    assert asyncio.run(inside_a_loop()) == RASTER
    with at.sources().open_sync(at_url(at.url)) as spooled:
        assert spooled.path.read_bytes() == RASTER
    with pytest.raises(SourceFailed, match="404"):
        at.sources().open_sync(at_url(at.url + "x"))
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


@pytest.mark.fault("F6")
def test_no_spelling_of_a_forbidden_host_connects(at: Setup) -> None:
    """Every spelling must be a 400; connections made: 0, names resolved: 0."""
    for url in trapped(at.good.port):
        error = at.refuse(url)
        assert (type(error), error.status) == (SourceRefused, 400), url
    assert (at.trap.connects, at.good.connects, at.names.asked) == (0, 0, [])


@pytest.mark.fault("F6")
def test_redirects_are_checked_from_scratch(at: Setup) -> None:
    """A redirect of an allowed host to each of these must be a 400; connections to the trap: 0."""
    for url in trapped(at.good.port):
        location = url.encode("utf-8").decode("latin-1")
        at.good.pages["/scene.tif"] = redirect(location)
        error = at.refuse()
        assert (type(error), error.status) == (SourceRefused, 400), url
    assert at.trap.connects == 0
    assert at.good.connects == len(trapped(at.good.port))


@pytest.mark.fault("F6")
def test_a_refused_redirect_is_named_as_one(at: Setup) -> None:
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


@pytest.mark.fault("F6")
def test_endless_redirects_are_refused(at: Setup) -> None:
    """A host that redirects for ever must be left after five redirects."""
    at.good.pages["/scene.tif"] = redirect("/scene.tif")
    assert "more than 5 redirects" in at.refuse().message
    assert at.good.connects == 6


@pytest.mark.fault("F6")
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
def test_a_name_of_a_private_address_is_refused(at: Setup, answers: list[str]) -> None:
    """One address that is neither public nor listed must spoil the name; connections made: 0."""
    at.names.table[NAME] = [answers]
    error = at.refuse()
    assert (type(error), error.status) == (SourceRefused, 400)
    assert "127.0.0" not in error.message
    assert (at.trap.connects, at.good.connects) == (0, 0)


@pytest.mark.fault("F6")
def test_dns_rebinding_is_not_possible(at: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name must be resolved once, by us: a second answer that leads to the trap is never asked for."""
    at.names.table[NAME] = [["127.0.0.1"], ["127.0.0.2"]]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_args, **_kinds: pytest.fail("resolved behind our back")
    )
    monkeypatch.setattr(socket, "gethostbyname", lambda _name: pytest.fail("resolved behind our back"))
    assert at.fetch() == RASTER
    assert at.names.asked == [NAME]
    assert (at.good.connects, at.trap.connects) == (1, 0)


@pytest.mark.fault("F6")
def test_dns_rebinding_on_a_redirect_is_refused(at: Setup) -> None:
    """A redirect is resolved anew, and checked anew: one that now leads to the trap must be refused."""
    at.names.table[NAME] = [["127.0.0.1"], ["127.0.0.2"]]
    at.good.pages["/scene.tif"] = redirect("/other.tif")
    assert isinstance(at.refuse(), SourceRefused)
    assert (at.good.connects, at.trap.connects) == (1, 0)


@pytest.mark.fault("F6")
async def test_addresses_of_the_machines_resolver_are_checked(at: Setup) -> None:
    """`localhost`, resolved by the machine itself, must be refused though the operator listed the name."""
    sources = Sources(settings(at.spool, f"localhost:{at.good.port}"))
    with pytest.raises(
        SourceRefused, match=r"resolves to a private address; .* baton_geo\.allowed_hosts too"
    ):
        await sources.open(at_url(f"http://localhost:{at.good.port}/scene.tif"))
    assert at.good.connects == 0
    assert "127.0.0.1" in await system_resolver("localhost", 80)


@pytest.mark.fault("F6")
def test_proxies_of_the_environment_are_not_used(at: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would connect where it likes, and learn the address; none may be used."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.2:{at.trap.port}")
    assert at.fetch() == RASTER
    assert at.trap.connects == 0


async def test_the_next_address_is_tried(at: Setup) -> None:
    """Where the first address takes no connection, another of the same answer must serve."""
    at.names.table[NAME] = [["127.0.0.3", "127.0.0.1"]]
    port = at.good.port
    sources = at.sources(f"{NAME}:{port}", f"127.0.0.3:{port}", f"127.0.0.1:{port}")
    with await sources.open(at_url(at.url)) as spooled:
        assert spooled.path.read_bytes() == RASTER


def test_the_operators_mistakes_show_at_the_start(tmp_path: Path) -> None:
    """A list entry that is no host must stop the plugin from being set up."""
    with pytest.raises(ValueError, match=r"baton_geo\.allowed_hosts"):
        Sources(settings(tmp_path, "https://example.org"))

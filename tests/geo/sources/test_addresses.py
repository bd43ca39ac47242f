"""Which addresses are taken, and which IP addresses count as public."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest
from geo.sources.fetching import at_url
from hypothesis import example, given
from hypothesis import strategies as st

from baton_fetch import addresses
from baton_fetch.addresses import AllowedHosts, Target, is_public
from baton_geo.errors import SourceRefused
from baton_geo.settings import GeoSettings
from baton_geo.sources import Sources, fetch_errors

HOSTS = AllowedHosts(
    ["example.org", "*.tiles.example.net", "mirror.example.org:8443", "203.0.113.7", "[2001:db8::7]:8080"]
)


def target_of(url: str, *, allow_http: bool = True) -> Target:
    """An address as a request's is taken: refusals are the plugin's own."""
    with fetch_errors():
        return addresses.target_of(url, HOSTS, allow_http=allow_http)


TAKEN = [
    ("https://example.org/a.tif", ("https", "example.org", 443, "/a.tif", "example.org")),
    ("https://example.org", ("https", "example.org", 443, "/", "example.org")),
    ("HTTPS://EXAMPLE.org:443/A?b=c%2F#frag", ("https", "example.org", 443, "/A?b=c%2F", "example.org")),
    ("http://example.org/a", ("http", "example.org", 80, "/a", "example.org")),
    ("https://a.b.tiles.example.net/", ("https", "a.b.tiles.example.net", 443, "/", "a.b.tiles.example.net")),
    (
        "https://mirror.example.org:8443/x",
        ("https", "mirror.example.org", 8443, "/x", "mirror.example.org:8443"),
    ),
    ("https://203.0.113.7/x", ("https", "203.0.113.7", 443, "/x", "203.0.113.7")),
    ("http://[2001:DB8:0::7]:8080/x", ("http", "2001:db8::7", 8080, "/x", "[2001:db8::7]:8080")),
    ("https://example.org/a b".replace(" ", "%20"), ("https", "example.org", 443, "/a%20b", "example.org")),
    ("https://example.org/@evil.org", ("https", "example.org", 443, "/@evil.org", "example.org")),
]


@pytest.mark.parametrize(("url", "parts"), TAKEN)
def test_addresses_taken(url: str, parts: tuple[str, str, int, str, str]) -> None:
    """An allowed address must come apart as RFC 3986 says, its fragment left out."""
    target = target_of(url)
    assert (target.scheme, target.host, target.port, target.path, target.authority) == parts


REFUSED = [
    "",
    "example.org/a",
    "//example.org/a",
    "https:example.org",
    "https:/example.org",
    "https:///example.org",
    "gopher://example.org/_GET",
    "file:///etc/passwd",
    "file://example.org/etc/passwd",
    "ftp://example.org/a",
    "javascript:alert(1)",
    "data:image/tiff;base64,AAAA",
    "unix:///run/x.sock",
    "https://evil.org/",
    "https://example.org.evil.org/",
    "https://evilexample.org/",
    "https://tiles.example.net/",
    "https://eviltiles.example.net/",
    "https://.tiles.example.net/",
    "https://x..tiles.example.net/",
    "https://example.org./",
    "https://user@example.org/",
    "https://user:pw@example.org/",
    "https://example.org@evil.org/",
    "https://example.org:443@evil.org/",
    "https://example.org%40evil.org/",
    "http://a\\@example.org/",
    "https://evil.org\\@example.org/",
    "https://evil.org\\.example.org/",
    "https://example.org\\evil",
    "https://evil.org#@example.org/",
    "https://evil.org?@example.org/",
    "https://evil.org;example.org/",
    "https://exa\tmple.org/",
    " https://example.org/",
    "https://example.org/a b",
    "https://example.org/\r\nHost: evil.org",
    "https://example.org\0.evil.org/",
    "https://ex\u00e4mple.org/",
    "https://example\u3002org/",
    "https://\uff45xample.org/",
    "https://example.org\u2044@evil.org/",
    "https://example.org:8443/",
    "https://mirror.example.org/",
    "https://example.org:80/",
    "https://example.org:0/",
    "https://example.org:65536/",
    "https://example.org:99999999999/",
    "https://example.org:+443/",
    "https://example.org:-1/",
    "https://example.org:/",
    "https://example.org:44\u0663/",
    "https://127.0.0.1/",
    "https://localhost/",
    "https://169.254.169.254/latest/meta-data",
    "https://[::1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:203.0.113.7]/",
    "https://[fe80::1%25eth0]:8080/",
    "https://[2001:db8::7%eth0]:8080/",
    "https://[v1.x]/",
    "https://[2001:db8::7/",
    "https://2001:db8::7/",
    "https://[203.0.113.7]/",
    "https://203.0.113.007/",
    "https://203.0.28935/",
    "https://3405803783/",
    "https://0xcb007107/",
    "https://0xcb.0.0x71.7/",
    "https://0313.0.0161.07/",
    "https://203.0.113.7.1/",
    "https://1.tiles.example.net.0x7f/",
    "https://example.org/" + "a" * 2048,
]


@pytest.mark.fault("F6")
@pytest.mark.parametrize("url", REFUSED)
def test_addresses_outside_the_list_are_refused(url: str) -> None:
    """Every other scheme, host, port and spelling must be refused, in a short message of plain text."""
    with pytest.raises(SourceRefused) as caught:
        target_of(url)
    assert caught.value.param == "data.data"
    assert caught.value.message.isascii()
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 700


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://user:pw@example.org/", "user name or a password"),
        ("http://a\\@example.org/", "percent-encode"),
        ("https://ex\u00e4mple.org/", "percent-encode"),
        ("gopher://example.org/", "'gopher' addresses are not fetched here; use https or http"),
        ("https://3405803783/", "plainly written IP address"),
        ("https://example.org:0/", "0 is not a port"),
        ("https://evil.org/", "'evil.org' is not one this server fetches from"),
    ],
)
def test_refusals_say_what_to_mend(url: str, said: str) -> None:
    """A person must be able to tell from the message which part of the address was refused."""
    with pytest.raises(SourceRefused) as caught:
        target_of(url)
    assert said in caught.value.message


@pytest.mark.fault("F6")
def test_plain_http_needs_the_operator() -> None:
    """Without `allow_http` only https is taken."""
    with pytest.raises(SourceRefused, match="use https"):
        target_of("http://example.org/a", allow_http=False)


@pytest.mark.fault("F6")
def test_without_allowed_hosts_every_address_is_refused() -> None:
    """A server whose operator lists no host must take no address, and say what to send instead."""
    with pytest.raises(SourceRefused, match="send the raster itself"):
        asyncio.run(Sources(GeoSettings()).open(at_url("https://example.org/a")))


@pytest.mark.fault("F6")
@given(st.text(st.sampled_from("htps:/\\@#?%[].0x1aexmplorgEVIL\u3002\t -_~;"), max_size=60))
@example("https://example.org/")
def test_no_spelling_leads_to_another_host(tail: str) -> None:
    """Whatever is written, what comes out must be a host of the list at a port of the list."""
    for url in (tail, "https://" + tail, "https://example.org" + tail):
        try:
            target = target_of(url)
        except SourceRefused:
            continue
        assert HOSTS.allows(target.host, target.port, {"https": 443, "http": 80}[target.scheme])
        assert target.path.isascii()
        assert target.path.isprintable()
        assert target.path.startswith("/")


PUBLIC = ["8.8.8.8", "1.1.1.1", "99.255.255.255", "100.128.0.0", "2606:4700::1111", "2a00:1450:4001::1"]
NOT_PUBLIC = [
    "0.0.0.0",
    "0.1.2.3",
    "10.1.2.3",
    "100.64.0.1",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.0.3",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.0.170",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:8.8.8.8",
    "::ffff:127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::8.8.8.8",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:808:808::",
    "3fff::1",
    "fc00::1",
    "fd12::1",
    "fe80::1",
    "fe80::1%1",
    "2606:4700::1111%1",
    "fec0::1",
    "ff02::1",
]


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses(text: str) -> None:
    """Addresses of the open internet must count as public."""
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.fault("F6")
@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_addresses_that_are_not_public_are_recognised(text: str) -> None:
    """Loopback, private, shared, link-local, multicast, reserved, and those that hold an IPv4 address."""
    assert not is_public(ipaddress.ip_address(text))


def test_a_private_address_needs_its_own_entry() -> None:
    """A name may lead to a private address only where that address, at that port, is listed as well."""
    hosts = AllowedHosts(["store.example.org:9000", "10.0.0.5:9000"])
    assert hosts.may_connect(ipaddress.ip_address("10.0.0.5"), 9000, 443)
    assert not hosts.may_connect(ipaddress.ip_address("10.0.0.5"), 443, 443)
    assert not hosts.may_connect(ipaddress.ip_address("10.0.0.6"), 9000, 443)
    assert not hosts.may_connect(ipaddress.ip_address("::ffff:10.0.0.5"), 9000, 443)


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "*",
        "*.",
        "https://example.org",
        "example.org/",
        "u@example.org",
        "a b",
        "h:0",
        "*.127.0.0.1",
        "0x7f.1",
    ],
)
def test_entries_that_are_no_hosts_are_the_operators_to_mend(entry: str) -> None:
    """A list entry that could never match must stop the start, not wait for a client to wonder."""
    with pytest.raises(ValueError, match=r"baton_geo\.allowed_hosts"):
        Sources(GeoSettings(allowed_hosts=(entry,)))

"""Which addresses may be fetched: one strict way to write them, an allow-list, and public IPs only.

Nothing here opens a connection or asks a resolver.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from baton_fetch.errors import FetchRefused

URL_CHARACTERS = 2048
IP = ipaddress.IPv4Address | ipaddress.IPv6Address
PORTS = {"https": 443, "http": 80}

# No user information, no percent sign (zones, encoded dots), nothing but ASCII.
_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9_.-]{1,253})(?::(?P<port>[0-9]{1,5}))?")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_VISIBLE = re.compile(r"[!-~]+")

# IANA's special-purpose registries, where Python's `is_global` says yes, or differs between versions.
_SPECIAL = tuple(
    ipaddress.ip_network(text)
    for text in (
        "100.64.0.0/10",  # carrier-grade NAT
        "192.0.0.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "198.18.0.0/15",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",
        "2001::/23",  # Teredo, ORCHID and other protocol assignments
        "2001:db8::/32",
        "2002::/16",  # 6to4: holds an IPv4 address
        "3fff::/20",
    )
)
# Global unicast. Outside are IPv4-mapped, NAT64 (64:ff9b::/96), link-local, unique local, multicast.
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")


@dataclass(frozen=True)
class Target:
    """An address that may be fetched, taken apart.

    Attributes:
        scheme: `http` or `https`.
        host: lower case; an IPv6 address without brackets.
        port: 1-65535.
        path: with the query, as it was written; without the fragment.
        url: as it was written; redirects are relative to it.
    """

    scheme: str
    host: str
    port: int
    path: str
    url: str

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True)
class _Rule:
    """One entry of `allowed_hosts`: a host, `*.` and a host, or an IP; with a port, or for the usual one."""

    host: str
    port: int | None

    def allows(self, host: str, port: int, default_port: int) -> bool:
        if port != (self.port if self.port is not None else default_port):
            return False
        if self.host.startswith("*."):
            return host.endswith(self.host[1:]) and ip_of(host) is None
        return host == self.host


class AllowedHosts:
    """The operator's list.

    Args:
        entries: each `example.org` (that host), `*.example.org` (those under it, not itself) or an IP
            address; with `:port` for another port than https's 443 and http's 80.
        setting: what the list is called where the operator wrote it.

    Raises:
        ValueError: an entry that is none of these.
    """

    def __init__(self, entries: Iterable[str], setting: str = "allowed_hosts") -> None:
        self._rules = tuple(_rule(entry, setting) for entry in entries)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def allows(self, host: str, port: int, default_port: int) -> bool:
        """Whether a client may name this host."""
        return any(rule.allows(host, port, default_port) for rule in self._rules)

    def may_connect(self, address: IP, port: int, default_port: int) -> bool:
        """Whether a connection may be made: the address is public, or is itself in the list."""
        return is_public(address) or self.allows(str(address), port, default_port)


def is_public(address: IP) -> bool:
    """Whether an address is one of the open internet's, and holds no other address inside it."""
    if any(address.version == network.version and address in network for network in _SPECIAL):
        return False
    if isinstance(address, ipaddress.IPv6Address) and (address not in _GLOBAL_V6 or address.scope_id):
        return False
    return address.is_global


def ip_of(host: str) -> IP | None:
    """The address a host is written as; None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def target_of(url: str, hosts: AllowedHosts, *, allow_http: bool) -> Target:
    """Takes a client's address, or a redirect's, apart.

    Raises:
        FetchRefused: it is not written in the one way we take, or the operator's list does not hold it.
    """
    if not hosts:
        raise FetchRefused("this server fetches no addresses")
    if len(url) > URL_CHARACTERS:
        raise FetchRefused(f"{len(url)} characters; an address has at most {URL_CHARACTERS}")
    if not _VISIBLE.fullmatch(url) or "\\" in url:
        raise FetchRefused(f"{quoted(url)} has a character no address has; percent-encode it")
    scheme, netloc, path = _split(url)
    schemes = ("https", "http") if allow_http else ("https",)
    if scheme not in schemes:
        raise FetchRefused(f"{quoted(scheme)} addresses are not fetched here; use {' or '.join(schemes)}")
    host, port = _host_and_port(netloc)
    port = PORTS[scheme] if port is None else port
    if not hosts.allows(host, port, PORTS[scheme]):
        raise FetchRefused(f"host {quoted(netloc)} is not one this server fetches from; ask its operator")
    return Target(scheme, host, port, path, url)


def _split(url: str) -> tuple[str, str, str]:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise FetchRefused(f"{quoted(url)} is not an address") from None
    return parts.scheme, parts.netloc, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _host_and_port(netloc: str) -> tuple[str, int | None]:
    if "@" in netloc:
        raise FetchRefused("an address with a user name or a password in it; leave them out")
    found = _AUTHORITY.fullmatch(netloc)
    if found is None:
        raise FetchRefused(f"{quoted(netloc)} is not a host, or one with a port")
    port = None if found["port"] is None else int(found["port"])
    if port is not None and not 0 < port < 65536:
        raise FetchRefused(f"{port} is not a port")
    return _host(found["host"].lower()), port


def _host(text: str) -> str:
    bracketed = text.startswith("[")
    address = ip_of(text.strip("[]"))
    if address is not None and bracketed == (address.version == 6):
        return str(address)
    labels = text.split(".")
    # 2130706433, 0x7f.1 and 0177.0.0.1 are IP addresses to some resolvers.
    if _NUMBER.fullmatch(labels[-1]) or not all(_LABEL.fullmatch(label) for label in labels):
        raise FetchRefused(f"{quoted(text)} is not a host name or a plainly written IP address")
    return text


def quoted(text: str, most: int = 120) -> str:
    """A client's text as a message may hold it: one line of ASCII in quotes, at most about `most` long."""
    return ascii(text[:most]) + ("..." if len(text) > most else "")


def _rule(entry: str, setting: str) -> _Rule:
    wild, name = ("*.", entry[2:]) if entry.startswith("*.") else ("", entry)
    address = ip_of(name)
    if address is not None and not wild:
        return _Rule(str(address), None)
    try:
        host, port = _host_and_port(name)
    except FetchRefused:
        raise ValueError(
            f"{setting}: {quoted(entry)} is not a host, *.host or IP address, or one with :port"
        ) from None
    if wild and ip_of(host) is not None:
        raise ValueError(f"{setting}: {quoted(entry)}: an IP address takes no *.")
    return _Rule(wild + host, port)

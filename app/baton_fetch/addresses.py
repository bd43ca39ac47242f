"""Check which URLs may be fetched: a strict syntax, an allow-list of hosts, and public IP addresses only.

Nothing here opens a connection or resolves a name. The errors of fetching:

    FetchError
    ├── FetchRefused   the URL, or one to which it redirects, is not allowed
    └── FetchFailed    the URL is allowed, but the file could not be fetched

Callers translate them to errors of their own. The messages are written for the client and contain no address
of the server.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

URL_CHARACTERS = 2048
IP = ipaddress.IPv4Address | ipaddress.IPv6Address
PORTS = {"https": 443, "http": 80}

# Without user information, percent signs (zones, encoded dots) and non-ASCII characters.
_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9_.-]{1,253})(?::(?P<port>[0-9]{1,5}))?")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_VISIBLE = re.compile(r"[!-~]+")

# Networks of IANA's special-purpose registries for which Python's `is_global` is true or differs by version.
# https://www.iana.org/assignments/iana-ipv4-special-registry and .../iana-ipv6-special-registry
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
# Global unicast (RFC 4291): not IPv4-mapped, NAT64 (64:ff9b::/96), link-local, unique local or multicast.
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")


class FetchError(Exception):
    """The base class of both; `reason` is for the client, and does not name the place in the request."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FetchRefused(FetchError):
    pass


class FetchFailed(FetchError):
    pass


@dataclass(frozen=True)
class Target:
    """The parts of a URL that may be fetched.

    Attributes:
        scheme: `http` or `https`.
        host: host name or IP address in lower case, an IPv6 address without brackets.
        port: port number, 1 to 65535.
        path: path and query as written, without the fragment.
        url: the URL as written, to which redirects are relative.
    """

    scheme: str
    host: str
    port: int
    path: str
    url: str

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True)
class _Rule:
    """One entry of `allowed_hosts`: a host, `*.` and a host, or an IP address; None is the scheme's port."""

    host: str
    port: int | None

    def allows(self, host: str, port: int, default_port: int) -> bool:
        if port != (self.port if self.port is not None else default_port):
            return False
        if self.host.startswith("*."):
            return host.endswith(self.host[1:]) and ip_of(host) is None
        return host == self.host


class AllowedHosts:
    """The operator's list of hosts from which files may be fetched.

    Args:
        entries: each `example.org` (that host), `*.example.org` (its subdomains, not itself) or an IP
            address; with `:port` for ports other than 443 (https) and 80 (http).
        setting: name of the setting with the list, for messages.

    Raises:
        ValueError: an entry has none of these forms.
    """

    def __init__(self, entries: Iterable[str], setting: str = "allowed_hosts") -> None:
        self.setting = setting
        self._rules = tuple(_rule(entry, setting) for entry in entries)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def allows(self, host: str, port: int, default_port: int) -> bool:
        """Return whether clients may name this host and port."""
        return any(rule.allows(host, port, default_port) for rule in self._rules)

    def may_connect(self, address: IP, port: int, default_port: int) -> bool:
        """Return whether a connection may be made: the IP address is public or itself in the list."""
        return is_public(address) or self.allows(str(address), port, default_port)


def is_public(address: IP) -> bool:
    """Return whether an IP address is on the public internet and does not embed another address."""
    if any(address.version == network.version and address in network for network in _SPECIAL):
        return False
    if isinstance(address, ipaddress.IPv6Address) and (address not in _GLOBAL_V6 or address.scope_id):
        return False
    return address.is_global


def ip_of(host: str) -> IP | None:
    """Return the IP address that a host is written as; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def target_of(url: str, hosts: AllowedHosts, *, allow_http: bool) -> Target:
    """Split a URL from a client or a redirect into its parts and check it.

    Raises:
        FetchRefused: the URL does not have the strict syntax, or its host is not in the list.
    """
    if not hosts:
        raise FetchRefused("this server fetches no addresses")
    if len(url) > URL_CHARACTERS:
        raise FetchRefused(f"the URL has {len(url)} characters; at most {URL_CHARACTERS} are allowed")
    if not _VISIBLE.fullmatch(url) or "\\" in url:
        raise FetchRefused(f"{quoted(url)} has a character that URLs may not contain; percent-encode it")
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
        raise FetchRefused(f"{quoted(url)} is not a URL") from None
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
    """Quote a client's text for a message: one line of ASCII, shortened to about `most` characters."""
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
        raise ValueError(f"{setting}: {quoted(entry)}: an IP address must not follow *.")
    return _Rule(wild + host, port)

"""Make the client of the shared store: one server, a cluster, or a primary that Sentinel names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

from valkey import Valkey, ValkeyCluster
from valkey.backoff import NoBackoff
from valkey.retry import Retry
from valkey.sentinel import Sentinel

from baton.errors import SettingsError

CONNECT_S = 0.5
SENTINEL_PORT = 26379
Client = Any
"""A client or a pipeline: their types are those of synchronous and asynchronous commands at once."""


@dataclass(frozen=True)
class SharedAddress:
    """Where the shared store is, and how it is asked.

    Attributes:
        url: its address: `valkey://HOST:PORT/DB`, `valkey+cluster://HOST:PORT`, or
            `valkey+sentinel://HOST:PORT,HOST:PORT/NAME?db=DB`; `valkeys` for TLS.
        pool: what all keys begin with; gateways of one pool share their handoffs.
        secret: the key of the digests of all KV, the same for all gateways of the pool.
        password: sent at each connection; None: the address says it, or there is none.
        timeout_s: seconds that one exchange may take.
        ca_file: certificates to trust, for `valkeys://`; None: the system's.
    """

    url: str
    pool: str
    secret: bytes
    password: str | None = None
    timeout_s: float = 1.0
    ca_file: str | None = None


def open_client(address: SharedAddress) -> Client:
    """Return a client for an address. A cluster is asked for its nodes at once, others at the first exchange.

    Raises:
        SettingsError: the address cannot be read.
        ValkeyError: no node of the cluster answers.
    """
    try:
        scheme, _, kind = urlsplit(address.url).scheme.partition("+")
        if kind == "sentinel":
            return _named_by_sentinel(address, tls=scheme in {"valkeys", "rediss"})
        options = _options(address)
        if address.ca_file is not None:
            options["ssl_ca_certs"] = address.ca_file
        url = _checked(address.url, scheme)
        if kind == "cluster":
            cluster: Client = ValkeyCluster  # untyped in the library
            return cluster.from_url(url, cluster_error_retry_attempts=0, **options)
        return Valkey.from_url(url, **options)
    except ValueError:  # whose text may have a part of the password, where that has a `/`
        raise SettingsError(
            "handoffs.shared: the address cannot be read: in user and password write / ? # @ [ ] as "
            "%2F %3F %23 %40 %5B %5D, or use `handoffs.shared_password_file`"
        ) from None


def _checked(url: str, scheme: str) -> str:
    """Return an address with a scheme that the library knows, which takes what it cannot read for a default.

    Raises:
        ValueError: there is no host, or what stands for the database is no number.
    """
    parts = urlsplit(url)
    if scheme != "unix" and not (parts.hostname and (parts.path.strip("/") or "0").isdecimal()):
        raise ValueError("not HOST:PORT/DB")
    return urlunsplit(parts._replace(scheme=scheme))


def _named_by_sentinel(address: SharedAddress, *, tls: bool) -> Client:
    """Return a client of the primary that Sentinel names; the sentinels are asked without a password.

    Raises:
        ValueError: the address cannot be read.
        SettingsError: it names no primary.
    """
    parts = urlsplit(address.url)
    name = parts.path.strip("/")
    if not name:
        raise SettingsError(
            "handoffs.shared: name the primary that Sentinel watches: valkey+sentinel://HOST:PORT/NAME"
        )
    user, _, hosts = parts.netloc.rpartition("@")
    username, _, password = user.partition(":")
    options = _options(address) | {"db": int(parse_qs(parts.query).get("db", ["0"])[0])}
    if username:
        options["username"] = unquote(username)
    if password and address.password is None:
        options["password"] = unquote(password)
    trust = {"ssl": True, "ssl_ca_certs": address.ca_file} if tls else {}
    asked = {
        key: value for key, value in _options(address).items() if key.startswith("socket_") or key == "retry"
    }
    sentinels = [_host_and_port(each) for each in hosts.split(",")]
    watch: Client = Sentinel  # untyped in the library
    return watch(sentinels, sentinel_kwargs=asked | trust, **options, **trust).master_for(name)


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("not HOST:PORT")
    return parts.hostname, parts.port or SENTINEL_PORT


def _options(address: SharedAddress) -> dict[str, Any]:
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": address.timeout_s,
        "socket_connect_timeout": min(CONNECT_S, address.timeout_s),
        "retry": Retry(NoBackoff(), 0),  # a deadline holds for all tries together
        "lib_name": None,  # each is an exchange more, of every new connection
        "lib_version": None,
    }
    if address.password is not None:
        options["password"] = address.password
    return options

"""Ask the shared store, with a deadline for every exchange and a pause after failures."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

import structlog
from blake3 import blake3
from valkey import Valkey, ValkeyCluster
from valkey.backoff import NoBackoff
from valkey.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ValkeyClusterException,
    ValkeyError,
)
from valkey.exceptions import TimeoutError as ValkeyTimeoutError
from valkey.retry import Retry
from valkey.sentinel import Sentinel

from baton.admission.breaker import REST_S, Breaker
from baton.errors import HandoffStoreUnavailable, SettingsError
from baton.library.valkey.scripts import CHECK
from baton.telemetry.metrics import SharedStoreMetrics

# Make the client of the shared store: one server, a cluster, or a primary that Sentinel names.


CONNECT_S = 0.5
SENTINEL_PORT = 26379
Client = Any
"""A client or a pipeline: their types are those of synchronous and asynchronous commands at once."""


@dataclass(frozen=True)
class ValkeyAddress:
    """The address of the shared store, and how it is asked.

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


def open_client(address: ValkeyAddress) -> Client:
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
    """Return an address whose scheme the library knows, which takes what it cannot read for a default."""
    parts = urlsplit(url)
    if scheme != "unix" and not (parts.hostname and (parts.path.strip("/") or "0").isdecimal()):
        raise ValueError("not HOST:PORT/DB")
    return urlunsplit(parts._replace(scheme=scheme))


def _named_by_sentinel(address: ValkeyAddress, *, tls: bool) -> Client:
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


def _options(address: ValkeyAddress) -> dict[str, Any]:
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


CHECK_EVERY_S = 60.0
"""So often the secret and the clock are compared again: a clock may be set while the gateway runs."""
SKEW_S = 1.0
"""A clock that differs less from the store's is taken to be right."""
LEAST_VERSION = 7
MOST_DIGITS = 18
TIMEOUTS = (TimeoutError, ValkeyTimeoutError)
REFUSALS = (AuthenticationError, NoPermissionError)
FAILURE_TYPES = (ValkeyError, ValkeyClusterException, OSError)
"""What an exchange raises that failed; a cluster's exceptions are not the client library's other ones."""


@dataclass(frozen=True)
class ServerMemory:
    """The memory that a server may take.

    Attributes:
        most: bytes; 0: no limit.
        policy: what it does when it is full: `maxmemory-policy`.
    """

    most: int
    policy: str


class ValkeyConnection:
    """A connection pool to the shared store, safe to use from several threads.

    The first exchange, the first after a failure, and one a minute compares the secret with that of the other
    gateways, and the clocks.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        address: ValkeyAddress,
        metrics: SharedStoreMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base = f"{address.pool}:{{i}}"
        self._pool = address.pool
        self._secret = address.secret
        self._seal_key = blake3(address.secret, derive_key_context="baton shared store 2026 records").digest()
        self._metrics = metrics
        self._clock = clock
        self._address = address
        self._opened: Client | None = None
        self._scripts: dict[str, Any] = {}
        self._opening = threading.Lock()
        self.breaker = Breaker(clock=clock)
        self._checked = False
        self._check_at = 0.0
        self._ahead_s = 0.0
        self._log = structlog.get_logger("baton.handoffs")

    def file_key(self, name: str) -> str:
        """Return the key of a file's bytes."""
        return f"{self._pool}:f:{{{name}}}"

    def own_key(self, name: str) -> str:
        """Return a key in the slot of the index."""
        return f"{self.base}:{name}"

    @property
    def ahead_s(self) -> float:
        """Seconds by which the store's clock is ahead of this machine's; 0 if they about agree."""
        return self._ahead_s

    def seal(self, *parts: str | bytes | int) -> str:
        """Return a keyed digest of some values, which nobody without the pool's secret can make."""
        told = [str(part).encode() if not isinstance(part, bytes) else part for part in (self._pool, *parts)]
        sized = b"".join(len(part).to_bytes(8, "big") + part for part in told)
        return blake3(sized, key=self._seal_key).hexdigest()

    def not_readable(self, what: str, name: str) -> None:
        """Count and log a value that no gateway of the pool wrote; it is left out."""
        self._metrics.not_used("unreadable")
        self._log.warning("shared_value_unreadable", what=what, name=name)

    def ask(self, operation: str, work: Callable[[Client], Any]) -> Any:
        """Exchange something with the store.

        Args:
            work: what is exchanged; given the client.

        Raises:
            HandoffStoreUnavailable: the store failed, did not answer in time, is left alone after failures,
                or belongs to gateways with another secret.
        """
        if self.breaker.resting():
            self._metrics.not_used("resting")
            raise HandoffStoreUnavailable(retry_after_s=round(REST_S))
        began = self._clock()
        try:
            if not self._checked or self._clock() >= self._check_at:
                self.check()
            answer = work(self._client())
        except FAILURE_TYPES as error:
            raise self._failed(operation, error) from None
        self._metrics.count(operation, self._clock() - began)
        self.breaker.succeeded()
        return answer

    def batch(self, operation: str, fill: Callable[[Client], object]) -> list[Any]:
        """Exchange several commands at once, which need not be one step; see `ask`."""

        def work(client: Client) -> list[Any]:
            pipe = client.pipeline(transaction=False)
            fill(pipe)
            return list(pipe.execute())

        answers: list[Any] = self.ask(operation, work)
        return answers

    def run(self, operation: str, script: str, arguments: Sequence[Any]) -> Any:
        """Run one of the scripts; see `ask`."""

        return self.ask(operation, lambda client: self._evaluate(client, script, arguments))

    def store_id(self) -> bytes:
        """Return the random number that tells the store from others, made at first use; see `ask`."""
        key, fresh = self.own_key("id"), secrets.token_hex(16)

        def work(client: Client) -> bytes:
            if (found := client.get(key)) is None:  # a server at the limit of its memory refuses any `set`
                client.set(key, fresh, nx=True)
                found = client.get(key)
            return bytes(found or b"")

        found: bytes = self.ask("look", work)
        return found

    def require_usable(self) -> None:
        """Check at the start that the store answers, and that this gateway may use it.

        A store that is down is no reason not to start: it is asked again later.

        Raises:
            SettingsError: it refuses this gateway, is too old, or has gateways with another secret.
        """
        try:
            self.check()
        except FAILURE_TYPES as error:
            if isinstance(error, REFUSALS) or isinstance(error.__cause__, REFUSALS):
                raise SettingsError(f"handoffs.shared: the store refuses this gateway: {error}") from None
            self._log.warning("shared_store_unavailable", reason=type(error).__name__)
        except HandoffStoreUnavailable as error:
            raise SettingsError(f"handoffs.shared: {error.message}") from None

    def memory(self) -> list[ServerMemory]:
        """Return the memory limit of each server of the store; see `ask`."""
        found = self.ask(
            "look", lambda client: client.execute_command("INFO", "memory", **_all_nodes(client))
        )
        each = found.values() if isinstance(next(iter(found.values())), dict) else [found]
        return [ServerMemory(int(told["maxmemory"]), str(told["maxmemory_policy"])) for told in each]

    def close(self) -> None:
        """Close all connections."""
        if self._opened is not None:
            self._opened.close()

    def _failed(self, operation: str, error: Exception) -> HandoffStoreUnavailable:
        if isinstance(error, OutOfMemoryError):
            self._metrics.failed("full")
            return HandoffStoreUnavailable("The shared store of handoffs is at the limit of its memory.")
        self._metrics.failed("timeout" if isinstance(error, TIMEOUTS) else "error")
        self._checked = False
        self.breaker.failed()
        self._log.warning("shared_store_failed", operation=operation, reason=type(error).__name__)
        return HandoffStoreUnavailable(retry_after_s=round(REST_S))

    def check(self) -> str:
        """Compare secret, version and clock with the store's.

        Returns:
            The version of the store.

        Raises:
            HandoffStoreUnavailable: gateways of the pool have another secret, or the store is too old.
            ValkeyError: the store failed; so do the other types of `FAILURE_TYPES`.
        """
        proof = hmac.new(
            self._secret, f"baton shared store {self._pool}".encode(), hashlib.sha256
        ).hexdigest()
        found, version, seconds, micros = self._evaluate(self._client(), CHECK, [proof])
        if not hmac.compare_digest(found or b"", proof.encode()):
            raise HandoffStoreUnavailable(
                f"the gateways of the pool '{self._pool}' have another secret (handoffs.shared_secret_file)"
            )
        version = version.decode()
        if int(version.partition(".")[0]) < LEAST_VERSION:
            raise HandoffStoreUnavailable(f"the store is version {version}; {LEAST_VERSION}.0 is the least")
        ahead = int(seconds) + int(micros) / 1e6 - time.time()
        self._ahead_s = ahead if abs(ahead) > SKEW_S else 0.0
        self.breaker.succeeded()
        self._checked, self._check_at = True, self._clock() + CHECK_EVERY_S
        return str(version)

    def _client(self) -> Client:
        """Return the client, made at its first use: a cluster must answer for it."""
        with self._opening:
            if self._opened is None:
                self._opened = open_client(self._address)
            return self._opened

    def _evaluate(self, client: Client, script: str, arguments: Sequence[Any]) -> Any:
        known = self._scripts.get(script)
        if known is not None:
            return known(keys=[self.base], args=list(arguments))
        answer = client.eval(script, 1, self.base, *arguments)  # which the server may not have yet
        self._scripts[script] = client.register_script(script)
        return answer


def number(value: bytes | int | None) -> int:
    """Return the count that a value of the store says; one that no gateway wrote counts as 0."""
    if isinstance(value, int):
        return max(0, value)
    return int(value) if value is not None and value.isdigit() and len(value) <= MOST_DIGITS else 0


def _all_nodes(client: Client) -> dict[str, Any]:
    """Return the option that asks all servers of a cluster which hold keys."""
    return {"target_nodes": client.PRIMARIES} if isinstance(client, ValkeyCluster) else {}

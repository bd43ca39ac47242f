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

import structlog
from valkey import Valkey
from valkey.backoff import NoBackoff
from valkey.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, ValkeyError
from valkey.exceptions import TimeoutError as ValkeyTimeoutError
from valkey.retry import Retry

from baton.errors import HandoffStoreUnavailable, SettingsError
from baton.telemetry.shared_store_metrics import SharedStoreMetrics

FAILURES = 3
"""After so many failures in a row the store is left alone for a while."""
REST_S = 5.0
CONNECT_S = 0.5
SKEW_S = 1.0
"""A clock that differs less from the store's is taken to be right."""
LEAST_VERSION = 7
TIMEOUTS = (TimeoutError, ValkeyTimeoutError)
REFUSALS = (AuthenticationError, NoPermissionError)
Commands = Any
"""The client or a pipeline: their types are those of synchronous and asynchronous commands at once."""


@dataclass(frozen=True)
class SharedAddress:
    """Where the shared store is, and how it is asked.

    Attributes:
        url: its address, as `valkey.from_url` takes it.
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


class SharedConnection:
    """A connection pool to the shared store, safe to use from several threads.

    The first exchange, and the first after a failure, compares the secret with that of the other gateways.

    Args:
        address: where the store is.
        metrics: where exchanges are counted.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        address: SharedAddress,
        metrics: SharedStoreMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base = f"{address.pool}:{{i}}"
        self._pool = address.pool
        self._secret = address.secret
        self._metrics = metrics
        self._clock = clock
        self._client: Commands = _client(address)
        self._scripts: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._failures = 0
        self._resting_until = 0.0
        self._checked = False
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

    def ask(self, operation: str, work: Callable[[Commands], Any]) -> Any:
        """Exchange something with the store.

        Args:
            operation: name of the exchange in the metrics.
            work: what is exchanged; given the client.

        Raises:
            HandoffStoreUnavailable: the store failed, did not answer in time, is left alone after failures,
                or belongs to gateways with another secret.
        """
        self._require_rested()
        began = self._clock()
        try:
            if not self._checked:
                self._check()
            answer = work(self._client)
        except (ValkeyError, OSError) as error:
            raise self._failed(operation, error) from None
        self._metrics.count(operation, self._clock() - began)
        with self._lock:
            self._failures = 0
        return answer

    def batch(self, operation: str, fill: Callable[[Commands], object]) -> list[Any]:
        """Exchange several commands at once, which need not be one step; see `ask`.

        Args:
            operation: name of the exchange in the metrics.
            fill: adds the commands.
        """

        def work(client: Commands) -> list[Any]:
            pipe = client.pipeline(transaction=False)
            fill(pipe)
            return list(pipe.execute())

        answers: list[Any] = self.ask(operation, work)
        return answers

    def run(self, operation: str, script: str, arguments: Sequence[Any]) -> Any:
        """Run one of the scripts; see `ask`."""

        def work(client: Commands) -> Any:
            known = self._scripts.get(script)
            if known is None:
                known = self._scripts[script] = client.register_script(script)
            return known(keys=[self.base], args=list(arguments))

        return self.ask(operation, work)

    def store_id(self) -> bytes:
        """Return the random number that tells the store from others, made at first use; see `ask`."""
        key, fresh = self.own_key("id"), secrets.token_hex(16)

        def work(client: Commands) -> bytes:
            client.set(key, fresh, nx=True)
            return bytes(client.get(key) or b"")

        found: bytes = self.ask("look", work)
        return found

    def require_usable(self) -> None:
        """Check at the start that the store answers, and that this gateway may use it.

        A store that is down is no reason not to start: it is asked again later.

        Raises:
            SettingsError: it refuses this gateway, is too old, or has gateways with another secret.
        """
        try:
            self._check()
        except (ValkeyError, OSError) as error:
            if isinstance(error, REFUSALS):
                raise SettingsError(f"handoffs.shared: the store refuses this gateway: {error}") from None
            self._log.warning("shared_store_unavailable", reason=type(error).__name__)
        except HandoffStoreUnavailable as error:
            raise SettingsError(f"handoffs.shared: {error.message}") from None

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _require_rested(self) -> None:
        with self._lock:
            if self._clock() < self._resting_until:
                self._metrics.rested()
                raise HandoffStoreUnavailable(retry_after_s=round(REST_S))
            if self._failures >= FAILURES:  # this exchange is the probe; others wait for how it ends
                self._resting_until = self._clock() + REST_S

    def _failed(self, operation: str, error: Exception) -> HandoffStoreUnavailable:
        if isinstance(error, OutOfMemoryError):
            self._metrics.failed("full")
            return HandoffStoreUnavailable("The shared store of handoffs is at the limit of its memory.")
        self._metrics.failed("timeout" if isinstance(error, TIMEOUTS) else "error")
        with self._lock:
            self._failures += 1
            self._checked = False
            if self._failures >= FAILURES:
                self._resting_until = self._clock() + REST_S
        self._log.warning("shared_store_failed", operation=operation, reason=type(error).__name__)
        return HandoffStoreUnavailable(retry_after_s=round(REST_S))

    def _check(self) -> None:
        """Compare secret, version and clock with the store's."""
        proof = hmac.new(
            self._secret, f"baton shared store {self._pool}".encode(), hashlib.sha256
        ).hexdigest()
        key = self.own_key("proof")
        client = self._client
        found = client.get(key)
        if found is None:
            client.set(key, proof, nx=True)
            found = client.get(key)
        if found is None or not hmac.compare_digest(found, proof.encode()):
            raise HandoffStoreUnavailable(
                f"the gateways of the pool '{self._pool}' have another secret (handoffs.shared_secret_file)"
            )
        seconds, micros = client.time()
        ahead = seconds + micros / 1e6 - time.time()
        self._ahead_s = ahead if abs(ahead) > SKEW_S else 0.0
        version = str(client.info("server").get("redis_version", "0"))
        if int(version.partition(".")[0]) < LEAST_VERSION:
            raise HandoffStoreUnavailable(f"the store is version {version}; {LEAST_VERSION}.0 is the least")
        with self._lock:
            self._checked, self._failures, self._resting_until = True, 0, 0.0


def _client(address: SharedAddress) -> Valkey:
    more: dict[str, Any] = {}
    if address.password is not None:
        more["password"] = address.password
    if address.ca_file is not None:
        more["ssl_ca_certs"] = address.ca_file
    try:
        return Valkey.from_url(
            address.url,
            protocol=2,
            socket_timeout=address.timeout_s,
            socket_connect_timeout=min(CONNECT_S, address.timeout_s),
            retry=Retry(NoBackoff(), 0),  # a deadline holds for all tries together
            **more,
        )
    except ValueError as error:
        raise SettingsError(f"handoffs.shared: {error}") from None

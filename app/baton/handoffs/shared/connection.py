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
from blake3 import blake3
from valkey import ValkeyCluster
from valkey.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ValkeyClusterException,
    ValkeyError,
)
from valkey.exceptions import TimeoutError as ValkeyTimeoutError

from baton.errors import HandoffStoreUnavailable, SettingsError
from baton.handoffs.shared.clients import Client, SharedAddress, open_client
from baton.handoffs.shared.scripts import CHECK
from baton.telemetry.shared_store_metrics import SharedStoreMetrics

FAILURES = 3
"""After so many failures in a row the store is left alone for a while."""
REST_S = 5.0
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
    """How much memory a server may take.

    Attributes:
        most: bytes; 0: no limit.
        policy: what it does when it is full: `maxmemory-policy`.
    """

    most: int
    policy: str


class SharedConnection:
    """A connection pool to the shared store, safe to use from several threads.

    The first exchange, the first after a failure, and one a minute compares the secret with that of the other
    gateways, and the clocks.

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
        self._seal_key = blake3(address.secret, derive_key_context="baton shared store 2026 records").digest()
        self._metrics = metrics
        self._clock = clock
        self._address = address
        self._opened: Client | None = None
        self._scripts: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._failures = 0
        self._resting_until = 0.0
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
            operation: name of the exchange in the metrics.
            work: what is exchanged; given the client.

        Raises:
            HandoffStoreUnavailable: the store failed, did not answer in time, is left alone after failures,
                or belongs to gateways with another secret.
        """
        self._require_rested()
        began = self._clock()
        try:
            if not self._checked or self._clock() >= self._check_at:
                self.check()
            answer = work(self._client())
        except FAILURE_TYPES as error:
            raise self._failed(operation, error) from None
        self._metrics.count(operation, self._clock() - began)
        with self._lock:
            self._failures = 0
        return answer

    def batch(self, operation: str, fill: Callable[[Client], object]) -> list[Any]:
        """Exchange several commands at once, which need not be one step; see `ask`.

        Args:
            operation: name of the exchange in the metrics.
            fill: adds the commands.
        """

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
        """Return what each server of the store may take; see `ask`."""
        found = self.ask(
            "look", lambda client: client.execute_command("INFO", "memory", **_all_nodes(client))
        )
        each = found.values() if isinstance(next(iter(found.values())), dict) else [found]
        return [ServerMemory(int(told["maxmemory"]), str(told["maxmemory_policy"])) for told in each]

    def close(self) -> None:
        """Close all connections."""
        if self._opened is not None:
            self._opened.close()

    def _require_rested(self) -> None:
        with self._lock:
            if self._clock() < self._resting_until:
                self._metrics.not_used("resting")
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
        with self._lock:
            self._checked, self._failures, self._resting_until = True, 0, 0.0
            self._check_at = self._clock() + CHECK_EVERY_S
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

"""Ask the archive's bucket, with a deadline for every request and a pause after failures."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import obstore
import structlog
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotModifiedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from baton.admission.breaker import REST_S, Breaker
from baton.errors import HandoffStoreUnavailable, SettingsError
from baton.telemetry.metrics import ArchiveMetrics
from baton_kv.stores.base import StoreError

# Say in words why a request to the archive failed, without what the service's own text gives away.


REFUSALS = (PermissionDeniedError, UnauthenticatedError)
NO_BUCKET = "NoSuchBucket"
CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")


class Cause(NamedTuple):
    """A way in which requests to S3 fail.

    Attributes:
        sign: what the text of the error has then.
        text: what happened.
        mend: what an operator can do about it.
    """

    sign: str
    text: str
    mend: str


CAUSES = (
    Cause(NO_BUCKET, "there is no such bucket", "create it, or correct `handoffs.archive`"),
    Cause(
        "169.254.169.254",
        "there are no credentials: no key file, no variables, and no role that answers",
        "set `handoffs.archive_key_file`, or the AWS_* variables, or give the machine a role",
    ),
    Cause("InvalidAccessKeyId", "the service does not know the access key", "correct the access key's id"),
    Cause(
        "SignatureDoesNotMatch",
        "the access key's secret is wrong",
        "correct the access key's secret, in `handoffs.archive_key_file` or AWS_SECRET_ACCESS_KEY",
    ),
    Cause(
        "RequestTimeTooSkewed",
        "this machine's clock is not the service's",
        "set this machine's clock (NTP)",
    ),
    Cause("ExpiredToken", "the session token has expired", "renew the credentials"),
    Cause(
        "AuthorizationHeaderMalformed", "the bucket is in another region", "correct `handoffs.archive_region`"
    ),
    Cause("PermanentRedirect", "the bucket is in another region", "correct `handoffs.archive_region`"),
    Cause("QuotaExceeded", "the bucket's quota is used up", "raise the quota, or let handoffs live shorter"),
    Cause("StorageFull", "the service has no room", "give it more, or let handoffs live shorter"),
    Cause("SlowDown", "the service asks for fewer requests", "wait, or lower `handoffs.archive_rate`"),
    Cause(
        "AccessDenied",
        "these credentials are not allowed to",
        "allow it: docs/how-to/archive.md has the policy",
    ),
    Cause(
        "invalid peer certificate",
        "its certificate is not trusted",
        "name its authority in `handoffs.archive_ca_file`",
    ),
    Cause("dns error", "the name of its host is unknown", "correct `handoffs.archive_endpoint`"),
    Cause(
        "kind: Timeout",
        "it does not answer in time",
        "look at the service, or raise `handoffs.archive_timeout_s`",
    ),
    Cause(
        "error sending request",
        "it cannot be reached",
        "start it, or correct `handoffs.archive_endpoint` and what is between",
    ),
)
UNKNOWN = "look at the service's own log"


def code_of(error: BaseException) -> str | None:
    """Return S3's name of the reason, such as `AccessDenied`."""
    found = CODE.search(str(error))
    return found[1] if found is not None else None


def is_no_bucket(error: BaseException) -> bool:
    """Return whether the bucket is missing, and not only the object."""
    return code_of(error) == NO_BUCKET


def kind_of(error: BaseException) -> str:
    """Return the kind of failure that is counted."""
    if isinstance(error, REFUSALS):
        return "refused"
    return "timeout" if "kind: Timeout" in str(error) else "error"  # obstore has no exception of its own


def cause_of(error: BaseException) -> Cause | None:
    """Return the known cause of a failure."""
    text, code = str(error), code_of(error)
    for cause in CAUSES:
        if cause.sign == code or (code is None and cause.sign in text):
            return cause
    return None


def reason_of(error: BaseException) -> str:
    """Return why a request failed, for a log: no host, no object."""
    code, cause = code_of(error), cause_of(error)
    refused = "the service refuses these credentials" if isinstance(error, REFUSALS) else None
    text = refused or (cause.text if cause is not None else type(error).__name__)
    return f"{text} ({code or type(error).__name__})"


def mend_of(error: BaseException) -> str:
    """Return an operator's remedy for a failure."""
    cause = cause_of(error)
    return cause.mend if cause is not None else UNKNOWN


CONNECT_S = 1.0
PART_S = 30.0
"""Seconds that one part of a file may take; a part has `PART_BYTES`."""
PART_BYTES = 8 * 1024 * 1024
PARTS_AT_ONCE = 2
PART_TRIES = 2
CLOSED_EVERY_S = 0.25
MAX_SMALL_BYTES = 64 * 1024 * 1024
"""What gateways write as a small object is never larger."""
PANIC = "PanicException"
"""What obstore raises, and does not export, where a service's answer makes no sense."""
UNAVAILABLE = "The archive of handoffs does not answer; try again shortly."
Answer = TypeVar("Answer")


class Conflict(Exception):
    """An object is not in the version that a change was made from."""


class NotChanged(Exception):
    """An object still is in the version that is known."""


@dataclass(frozen=True)
class BucketAddress:
    """The address of the archive, and how it is asked.

    Attributes:
        prefix: what the names of all objects begin with.
        endpoint: address of another service than AWS's; None: of the environment, else AWS's.
        region: of the bucket; None: of the environment.
        key: id and secret of an access key; None: of the environment, or of the machine's role.
        certificates: to trust, as PEM; None: the system's.
        timeout_s: seconds that a small request may take.
        fetch_s: seconds in which a handoff must have been fetched; a part of it may take no longer.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    key: tuple[str, str] | None = field(default=None, repr=False)
    certificates: bytes | None = None
    timeout_s: float = 2.0
    fetch_s: float = 20.0


class Found(NamedTuple):
    """A small object."""

    data: bytes
    version: str


class Bucket:
    """The objects under one prefix of a bucket, for several threads.

    All calls block, and raise `HandoffStoreUnavailable` where the server fails.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, address: BucketAddress, metrics: ArchiveMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._small = _client(address, address.timeout_s, retries=0)
        self._large = _client(address, max(PART_S, address.timeout_s), retries=PART_TRIES - 1)
        self._parts = _client(address, min(PART_S, address.fetch_s), retries=0)
        self.breaker = Breaker(clock=clock)
        self._closed = threading.Event()
        self._log = structlog.get_logger("baton.handoffs")

    def close(self) -> None:
        """Stop waiting for uploads and downloads under way."""
        self._closed.set()

    def get(self, name: str, unless: str | None = None) -> Found | None:
        """Read a small object; None: there is none. One that is too large counts as empty.

        Raises:
            NotChanged: it still is that version.
        """

        def work() -> Found | None:
            try:
                found = self._small.get(name, options={"if_none_match": unless} if unless else {})
                small = found.meta["size"] <= MAX_SMALL_BYTES
                return Found(bytes(found.bytes()) if small else b"", found.meta["e_tag"] or "")
            except FileNotFoundError as error:
                _require_bucket(error)
                return None
            except NotModifiedError:
                raise NotChanged() from None

        return self._ask("get", work)

    def put(self, name: str, data: bytes, over: str | None = None, *, new: bool = False) -> str:
        """Write a small object; returns its version.

        Args:
            over: the version that it may replace; None: any.
            new: there must be none under this name.

        Raises:
            Conflict: another version is there, or none.
        """

        def work() -> str:
            mode: Any = "create" if new else {"e_tag": over} if over is not None else "overwrite"
            try:
                return self._small.put(name, data, mode=mode, use_multipart=False)["e_tag"] or ""
            except (AlreadyExistsError, PreconditionError):
                raise Conflict() from None
            except FileNotFoundError as error:
                if over is None or is_no_bucket(error):
                    raise
                raise Conflict() from None  # that is what some services say where there is nothing to replace

        return self._ask("put", work)

    def head(self, name: str) -> tuple[int, float] | None:
        """Return an object's size and age in seconds; None: there is none."""

        def work() -> tuple[int, float] | None:
            try:
                found = self._small.head(name)
            except FileNotFoundError as error:
                _require_bucket(error)
                return None
            return found["size"], time.time() - found["last_modified"].timestamp()

        return self._ask("head", work)

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""

        def work() -> None:
            try:
                self._small.delete(name)
            except FileNotFoundError as error:
                _require_bucket(error)

        self._ask("delete", work)

    def names(self, prefix: str) -> Iterator[str]:
        """Return the names under a prefix, in order."""
        listing = iter(self._small.list(prefix))
        while (chunk := self._ask("list", lambda: next(listing, None))) is not None:
            yield from (each["path"] for each in chunk)

    def upload(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a large object, as a whole or not at all.

        Args:
            parts: its bytes; an exception of it ends the upload.

        Raises:
            StoreError: the gateway ends.
        """

        def work() -> None:
            self._large.put(name, parts, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

        self._ask("upload", lambda: self._apart(work))

    def part(self, name: str, start: int, stop: int) -> bytes:
        """Read some bytes of a large object, fewer at its end.

        Raises:
            FileNotFoundError: there is no such object.
            StoreError: the gateway ends.
        """
        found = self._ask("part", lambda: self._apart(lambda: _part(self._parts, name, start, stop)))
        if found is None:
            raise FileNotFoundError(name)
        return found

    def require_usable(self, name: str, proof: bytes) -> None:
        """Check at the start that the bucket may be used, and belongs to gateways with the same secret.

        An archive that is down is no reason not to start: it is asked again later.

        Args:
            name: of an object that the first gateway writes.

        Raises:
            SettingsError: it refuses this gateway, does not exist, or has gateways with another secret.
        """
        try:
            self._small.put(name, proof, mode="create", use_multipart=False)
            found: bytes | None = proof
        except AlreadyExistsError:
            found = self._proof(name)
        except FileNotFoundError:
            raise SettingsError("handoffs.archive: there is no such bucket") from None
        except REFUSALS as error:
            raise SettingsError(f"handoffs.archive: {reason_of(error)}") from None
        except (BaseError, OSError) as error:
            self._log.warning("archive_unavailable", reason=reason_of(error))
            return
        if found is not None and found != proof:
            raise SettingsError(
                "handoffs.archive: it belongs to gateways with another secret (handoffs.shared_secret_file)"
            )

    def _proof(self, name: str) -> bytes | None:
        try:
            return bytes(self._small.get(name).bytes())
        except REFUSALS as error:
            raise SettingsError(f"handoffs.archive: {reason_of(error)}") from None
        except (BaseError, OSError) as error:
            self._log.warning("archive_unavailable", reason=reason_of(error))
            return None

    def _ask(self, operation: str, work: Callable[[], Answer]) -> Answer:
        if self.breaker.resting():
            self._metrics.not_used("resting")
            raise HandoffStoreUnavailable(UNAVAILABLE, retry_after_s=round(REST_S))
        began = self._clock()
        try:
            answer = work()
        except (Conflict, NotChanged):
            self._succeeded(operation, began)
            raise
        except (BaseError, OSError) as error:
            raise self._failed(operation, error) from error
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            raise self._failed(operation, error) from error
        self._succeeded(operation, began)
        return answer

    def _apart(self, work: Callable[[], Answer]) -> Answer:
        """Do what may take long in a thread that nothing waits for when the gateway ends."""
        done: Future[Answer] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  # raised where the answer is waited for
                done.set_exception(error)

        threading.Thread(target=run, name="archive-request", daemon=True).start()
        while not wait([done], CLOSED_EVERY_S).done:
            if self._closed.is_set():
                raise StoreError("the gateway ends")
        return done.result()

    def _succeeded(self, operation: str, began: float) -> None:
        self._metrics.count(operation, self._clock() - began)
        self.breaker.succeeded()

    def _failed(self, operation: str, error: BaseException) -> HandoffStoreUnavailable:
        self._metrics.failed(kind_of(error))
        self.breaker.failed()
        self._log.warning("archive_failed", operation=operation, reason=reason_of(error))
        return HandoffStoreUnavailable(UNAVAILABLE, retry_after_s=round(REST_S))


def _part(store: S3Store, name: str, start: int, stop: int) -> bytes | None:
    try:
        return obstore.get_range(store, name, start=start, end=stop).to_bytes()
    except FileNotFoundError as error:
        _require_bucket(error)
        return None


def _require_bucket(error: FileNotFoundError) -> None:
    """Raise the error again if the whole bucket is missing, which does not mean that the object never was."""
    if is_no_bucket(error):
        raise error


def _client(address: BucketAddress, timeout_s: float, retries: int) -> S3Store:
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=min(CONNECT_S, timeout_s)),
        "allow_http": address.endpoint is not None and address.endpoint.startswith("http://"),
    }
    if address.certificates is not None:
        options["root_certificate"] = address.certificates
    more: dict[str, Any] = {"endpoint": address.endpoint, "region": address.region}
    if address.key is not None:
        more["access_key_id"], more["secret_access_key"] = address.key
    retry: Any = {"max_retries": retries, "retry_timeout": timedelta(seconds=timeout_s)}
    try:
        return S3Store(
            address.bucket,
            prefix=address.prefix or None,
            client_options=options,  # type: ignore[arg-type]  # their dictionaries are typed by key
            retry_config=retry,
            **{name: value for name, value in more.items() if value is not None},
        )
    except (BaseError, ValueError) as error:
        raise SettingsError(f"handoffs.archive: {error}") from None

"""Check the archive of handoffs for `baton doctor`: permissions, secret, clock, round trip, throughput."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing

from prometheus_client import CollectorRegistry

from baton.config.groups import HandoffSettings
from baton.config.settings import Settings
from baton.doctor.findings import Finding
from baton.errors import HandoffStoreUnavailable, OperatorError
from baton.library.archive.bucket import Bucket, Conflict, mend_of, reason_of
from baton.library.archive.copies import FETCH_S, ArchiveFiles, Pace
from baton.library.archive.documents import PROOF, Names
from baton.library.archive.tier import address_of, names_of
from baton.library.here.entries import Deadline, LocalFile
from baton.telemetry.metrics import ArchiveMetrics
from baton_kv.stores.base import StoreError

SUBJECT = "archive"
FOLDER = "files/doctor/"
"""Where it writes: the lifecycle rule for files deletes what a doctor that was killed left there."""
ROUND_TRIPS = 10
MIB = 1024**2
TEST_BYTES = 16 * MIB
SKEWED_S = 30.0
"""Handoffs are deleted a minute after their end, by the clock of any gateway."""


class Wrong(Exception):
    """The service answers, but not as the archive needs it."""


def examine_archive(settings: Settings) -> Iterator[Finding]:
    """Check the bucket that `handoffs.archive` names."""
    metrics = ArchiveMetrics(CollectorRegistry())
    try:
        names = names_of(settings.handoffs)
        bucket = Bucket(address_of(settings.handoffs), metrics)
    except OperatorError as error:
        yield Finding(SUBJECT, error.message, True, "correct the setting")
        return
    name = FOLDER + secrets.token_hex(8)
    try:
        findings = list(_permissions(bucket, name))
        yield from findings
        if not findings[0].bad:
            yield from _measures(bucket, names, metrics, name, settings.handoffs)
    finally:
        with contextlib.suppress(HandoffStoreUnavailable):
            bucket.delete(name)
        bucket.close()


def _permissions(bucket: Bucket, name: str) -> Iterator[Finding]:
    """Do each of the things that gateways do; the first finding is bad if nothing else is worth a try."""
    first = _tried("write", "s3:PutObject", lambda: _write(bucket, name))
    if first is not None:
        yield first
        return
    checks: list[tuple[str, str, Callable[[], None]]] = [
        ("read", "s3:GetObject", lambda: _read(bucket, name)),
        ("list", "s3:ListBucket", lambda: _list(bucket, name)),
        ("write over a version", "s3:PutObject", lambda: _write_over(bucket, name)),
        ("delete", "s3:DeleteObject", lambda: _delete(bucket, name)),
    ]
    bad = [found for check in checks if (found := _tried(*check)) is not None]
    if bad:
        yield from bad
    else:
        yield Finding(SUBJECT, "answers; objects can be written, listed, read and deleted")


def _tried(what: str, permission: str, work: Callable[[], None]) -> Finding | None:
    try:
        work()
    except Wrong as error:
        return Finding(f"{SUBJECT} {what}", str(error), True, "use a service that obeys S3's conditions")
    except HandoffStoreUnavailable as error:
        cause = error.__cause__ or error
        text = f"cannot {what}: {reason_of(cause)}"
        return Finding(f"{SUBJECT} {what}", text, True, f"{mend_of(cause)} ({permission})")
    return None


def _write(bucket: Bucket, name: str) -> None:
    bucket.put(name, b"doctor", new=True)


def _read(bucket: Bucket, name: str) -> None:
    found = bucket.get(name)
    if found is None or found.data != b"doctor":
        raise Wrong("an object that was just written is not found, or is another")


def _list(bucket: Bucket, name: str) -> None:
    if name not in bucket.names(FOLDER):
        raise Wrong("an object that was just written is not listed")


def _write_over(bucket: Bucket, name: str) -> None:
    """Check that nothing is written over a version that the writer has not seen."""
    for over, new in ((None, True), ('"another version"', False)):
        with contextlib.suppress(Conflict):
            bucket.put(name, b"doctor", over, new=new)
            raise Wrong("it does not obey `If-Match` and `If-None-Match`: changes would be lost")


def _delete(bucket: Bucket, name: str) -> None:
    bucket.delete(name)
    if bucket.head(name) is not None:
        raise Wrong("an object that was just deleted is still found")


def _measures(
    bucket: Bucket, names: Names, metrics: ArchiveMetrics, name: str, settings: HandoffSettings
) -> Iterator[Finding]:
    try:
        yield _secret(bucket, names)
        yield _clock(bucket, name)
        yield _round_trip(bucket, name, settings)
        with closing(ArchiveFiles(bucket, names, metrics, Pace(None), renewed_s=60)) as files:
            yield _throughput(files, name, settings)
    except (HandoffStoreUnavailable, StoreError) as error:
        cause = error.__cause__ or error
        yield Finding(SUBJECT, f"failed meanwhile: {reason_of(cause)}", True, mend_of(cause))


def _secret(bucket: Bucket, names: Names) -> Finding:
    found = bucket.get(PROOF)
    if found is None:
        return Finding(f"{SUBJECT} secret", "no gateway has used this bucket and prefix yet")
    bad = found.data != names.proof()
    text = "belongs to gateways with another secret" if bad else "is that of its gateways"
    mend = "give all gateways one `handoffs.shared_secret_file`, or this one another prefix" if bad else ""
    return Finding(f"{SUBJECT} secret", text, bad, mend)


def _clock(bucket: Bucket, name: str) -> Finding:
    bucket.put(name, b"doctor")
    found = bucket.head(name)
    behind = found[1] if found is not None else 0.0
    if abs(behind) < 2:  # the service tells whole seconds
        return Finding(f"{SUBJECT} clock", "agrees with this machine's to a second")
    bad = abs(behind) > SKEWED_S
    text = f"is {abs(behind):,.0f} s {'behind' if behind > 0 else 'ahead of'} this machine's"
    return Finding(f"{SUBJECT} clock", text, bad, "set this machine's clock (NTP)" if bad else "")


def _round_trip(bucket: Bucket, name: str, settings: HandoffSettings) -> Finding:
    taken = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        bucket.get(name)
        taken.append(time.perf_counter() - began)
    bad = max(taken) > settings.archive_timeout_s / 2
    median, longest = statistics.median(taken) * 1000, max(taken) * 1000
    text = f"{median:.1f} ms (median of {ROUND_TRIPS}, longest {longest:.1f})"
    mend = "raise `handoffs.archive_timeout_s`, or take a nearer bucket" if bad else ""
    return Finding(f"{SUBJECT} round trip", text, bad, mend)


def _throughput(files: ArchiveFiles, name: str, settings: HandoffSettings) -> Finding:
    """Write a file as handoffs' are written, and read it; what does not come in time is bad."""
    data = secrets.token_bytes(MIB) * (TEST_BYTES // MIB)
    began = time.perf_counter()
    written = files.push(name, LocalFile.holding(name, data))
    between = time.perf_counter()
    try:
        for _ in files.chunks(written, Deadline.within(FETCH_S, settings.archive_fetch_s)):
            pass
    except StoreError as error:
        mend = "raise `handoffs.archive_fetch_s`, or take a nearer bucket: KV would always be computed"
        return Finding(f"{SUBJECT} throughput", f"reading {TEST_BYTES // MIB} MiB: {error}", True, mend)
    fetch_s, push_s = time.perf_counter() - between, between - began
    push, fetch = TEST_BYTES / MIB / push_s, TEST_BYTES / MIB / fetch_s
    most = fetch * settings.archive_fetch_s
    text = f"push {push:,.0f} MiB/s, fetch {fetch:,.0f} MiB/s: up to {most:,.0f} MiB in `archive_fetch_s`"
    return Finding(f"{SUBJECT} throughput", text)

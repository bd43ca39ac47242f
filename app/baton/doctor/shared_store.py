"""Check the shared store of handoffs for `baton doctor`: version, memory, clock, round trip, throughput."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Iterator
from contextlib import closing

from prometheus_client import CollectorRegistry

from baton.config.groups import HandoffSettings
from baton.config.settings import Settings
from baton.doctor.findings import Finding
from baton.errors import BatonError, OperatorError
from baton.library.here.entries import Deadline, LocalFile
from baton.library.valkey.connection import FAILURE_TYPES, ValkeyConnection
from baton.library.valkey.files import CHUNK_BYTES, ValkeyFiles
from baton.library.valkey.pool import address_of
from baton.telemetry.metrics import SharedStoreMetrics
from baton_kv.stores.base import StoreError

SUBJECT = "shared store"
ROUND_TRIPS = 20
SLOW_S = 0.005
"""With a longer round trip, a request pays tens of milliseconds for the exchanges that it waits for."""
TEST_BYTES = 32 * CHUNK_BYTES
MIB = 1024**2


def examine_shared_store(settings: Settings) -> Iterator[Finding]:
    """Check the store that `handoffs.shared` names."""
    try:
        address = address_of(settings.handoffs)
    except OperatorError as error:
        yield Finding(SUBJECT, error.message, True, "correct the setting")
        return
    metrics = SharedStoreMetrics(CollectorRegistry())
    connection = ValkeyConnection(address, metrics)
    try:
        yield Finding(SUBJECT, f"answers; version {connection.check()}")
        yield from _memory(connection, settings.handoffs)
        yield _clock(connection)
        yield _round_trip(connection)
        with closing(ValkeyFiles(connection, metrics)) as files:
            yield _throughput(files)
    except (BatonError, StoreError) as error:
        yield Finding(SUBJECT, str(error), True, "correct the setting, or the server's")
    except FAILURE_TYPES as error:
        mend = "start it, or correct `handoffs.shared`, its password and its certificates"
        yield Finding(SUBJECT, f"does not answer: {error}", True, mend)
    finally:
        connection.close()


def _memory(connection: ValkeyConnection, settings: HandoffSettings) -> Iterator[Finding]:
    """Compare the memory that the servers may take with the budget."""
    told = connection.memory()
    budget = int(settings.shared_budget)
    most = sum(each.most for each in told)
    policies = sorted({each.policy for each in told})
    bad = policies != ["noeviction"] and any(each.most for each in told)
    mend = "set `maxmemory-policy noeviction`: the gateways evict by tenant and use" if bad else ""
    yield Finding(f"{SUBJECT} eviction", ", ".join(policies), bad, mend)
    if any(not each.most for each in told):
        text = f"no `maxmemory`; handoffs take {budget / MIB:,.0f} MiB at most"
        yield Finding(f"{SUBJECT} memory", text)
        return
    bad = most < budget * 1.1
    text = f"maxmemory {most / MIB:,.0f} MiB; handoffs take {budget / MIB:,.0f} MiB at most"
    mend = "raise `maxmemory` to a tenth above `handoffs.shared_budget`, or lower that" if bad else ""
    yield Finding(f"{SUBJECT} memory", text, bad, mend)


def _clock(connection: ValkeyConnection) -> Finding:
    ahead = connection.ahead_s
    if not ahead:
        return Finding(f"{SUBJECT} clock", "agrees with this machine's to a second")
    text = f"is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
    return Finding(f"{SUBJECT} clock", f"{text}; handoffs expire by the store's")


def _round_trip(connection: ValkeyConnection) -> Finding:
    taken = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        connection.ask("look", lambda client: client.exists(connection.own_key("proof")))
        taken.append(time.perf_counter() - began)
    median = statistics.median(taken)
    bad = median > SLOW_S
    text = f"{median * 1000:.2f} ms (median of {ROUND_TRIPS}, longest {max(taken) * 1000:.2f})"
    mend = "put the store nearer to the gateways: a request waits for several" if bad else ""
    return Finding(f"{SUBJECT} round trip", text, bad, mend)


def _throughput(files: ValkeyFiles) -> Finding:
    """Write a file as handoffs' are written, read it, and remove it."""
    data = secrets.token_bytes(CHUNK_BYTES) * (TEST_BYTES // CHUNK_BYTES)
    name = f"doctor/{secrets.token_hex(8)}"
    began = time.perf_counter()
    files.write(LocalFile.holding(name, data), 60_000, time.monotonic() + 60)
    written = time.perf_counter()
    _, chunks = files.chunks(name, Deadline.within("the check", 60), len(data))
    for index, chunk in enumerate(chunks):
        if chunk != data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]:
            raise StoreError("the store gave other bytes back than were written")
    read = time.perf_counter()
    files.unlink([name.encode()])
    push, fetch = TEST_BYTES / MIB / (written - began), TEST_BYTES / MIB / (read - written)
    return Finding(f"{SUBJECT} throughput", f"push {push:,.0f} MiB/s, fetch {fetch:,.0f} MiB/s")

"""Bound the bytes that the bodies of all requests hold, and each tenant's share of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import Gauge
from pydantic import ByteSize

from baton.config.groups import MIB
from baton.config.settings import Settings
from baton.errors import GatewayOverloaded, RateLimited

RETRY_AFTER_S = 5
MOST = 2 * 1024 * MIB
"""Default of `limits.bodies_bytes`, at most."""
SHARE_OF_MEMORY = 8
LEAST_BODIES = 4
"""Bodies of the largest size that always fit, however little memory there is."""

UPLOADS = 8
"""Files of the largest size that fit by default."""
FORM_BYTES = 64 * 1024
"""Bytes of a form beside the file in it."""


@dataclass(frozen=True)
class BodyRoom:
    """The limits of one kind of bodies.

    Attributes:
        each: bytes of one body.
        together: bytes of the bodies of all requests.
        setting: name of the setting of `together`, for error messages.
        one_tenant: whether all requests are of one tenant, which may use everything.
    """

    each: int
    together: int
    setting: str
    one_tenant: bool = False


@dataclass(frozen=True)
class BodyRooms:
    """The limits of bodies in memory and on disk.

    Attributes:
        memory: of all bodies but uploaded files.
        disk: of uploaded files.
        files: of forms with files that are kept.
        lines: of lines of batches, which are in memory beside the bodies of clients.
    """

    memory: BodyRoom
    disk: BodyRoom
    files: BodyRoom
    lines: BodyRoom

    @staticmethod
    def of(settings: Settings, *, available: int | None, one_tenant: bool) -> BodyRooms:
        """Return the limits by the settings, or by the machine where those give none.

        Args:
            available: bytes of memory available; None: unknown.
            one_tenant: whether the gateway has no keys.
        """
        limits, pooling = settings.limits, settings.pooling
        share = MOST if available is None else min(MOST, available // SHARE_OF_MEMORY)
        in_memory = limits.bodies_bytes or max(LEAST_BODIES * limits.body_bytes, share)
        on_disk = pooling.uploads_bytes or UPLOADS * pooling.upload_bytes
        form = int(settings.batches.file_bytes) + FORM_BYTES
        return BodyRooms(
            BodyRoom(int(limits.body_bytes), int(in_memory), "limits.bodies_bytes", one_tenant),
            BodyRoom(int(pooling.upload_bytes), int(on_disk), "pooling.uploads_bytes", one_tenant),
            BodyRoom(form, UPLOADS * form, "batches.file_bytes", one_tenant),
            BodyRoom(
                int(limits.body_bytes), LEAST_BODIES * int(limits.body_bytes), "limits.body_bytes", one_tenant
            ),
        )


class BodyBudget:
    """Counts the bytes of all requests' bodies and shares them between tenants.

    A tenant may always hold one body of the largest size, and more only while it leaves as much free as it
    holds: another tenant always finds room, however many there are.

    Args:
        room: the limits; also an attribute.
        gauge: shows the bytes held.
        short: returns whether memory is short, so that no body may grow.
    """

    def __init__(self, room: BodyRoom, gauge: Gauge, *, short: Callable[[], bool] = lambda: False) -> None:
        self.room = room
        self._short = short
        self._held: Counter[str] = Counter()
        gauge.set_function(self._held.total)

    @contextmanager
    def lease(self, tenant: str) -> Iterator[BodyLease]:
        """Count one request's body until the block ends."""
        lease = BodyLease(self, tenant)
        try:
            yield lease
        finally:
            self._held[tenant] -= lease.size
            if not self._held[tenant]:
                del self._held[tenant]

    def take(self, tenant: str, size: int) -> None:
        """Count more bytes for a tenant.

        Raises:
            RateLimited: the tenant holds its share already.
            GatewayOverloaded: the bodies of all requests take all there is, or memory is short.
        """
        if self._short():
            raise GatewayOverloaded(retry_after_s=RETRY_AFTER_S)
        room, held = self.room, self._held[tenant] + size
        free = room.together - self._held.total() - size
        if free < 0:
            raise GatewayOverloaded(
                f"The bodies of all requests take the {_readable(room.together)} they may (setting "
                f"{room.setting}); try again shortly.",
                retry_after_s=RETRY_AFTER_S,
            )
        if not room.one_tenant and held > max(room.each, free):
            raise RateLimited(
                f"The bodies of your running requests take {_readable(self._held[tenant])}, your present "
                f"share (setting {room.setting}); try again when one of them has ended.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._held[tenant] += size


class BodyLease:
    """The bytes that one request's body holds.

    Attributes:
        size: bytes held.
    """

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self.size = 0

    def take(self, size: int) -> None:
        """Count bytes that have arrived.

        Raises:
            RateLimited: the tenant holds its share already.
            GatewayOverloaded: the bodies of all requests take all there is, or memory is short.
        """
        if size:
            self._budget.take(self._tenant, size)
            self.size += size


def _readable(size: int) -> str:
    return ByteSize(size).human_readable()

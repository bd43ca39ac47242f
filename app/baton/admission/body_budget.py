"""Bound what the bodies of all requests hold at once, and what those of one tenant may hold of it."""

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
"""Bytes, where the settings say nothing."""
SHARE_OF_MEMORY = 8
LEAST_BODIES = 4
"""Bodies of the largest size that there is room for, however little memory there is."""

UPLOADS = 8
"""Files of the largest size that there is room for, where the settings say nothing."""


@dataclass(frozen=True)
class BodyRoom:
    """What the bodies of one kind may take.

    Attributes:
        each: bytes of one.
        together: bytes of all requests' at once.
        setting: the name of the setting that says so, for error messages.
        one_tenant: whether everybody is the same tenant, to whom all of it belongs.
    """

    each: int
    together: int
    setting: str
    one_tenant: bool = False


@dataclass(frozen=True)
class BodyRooms:
    """Room for the bodies in memory, and for the files on disk.

    Attributes:
        memory: for all bodies but files sent as they are.
        disk: for these.
    """

    memory: BodyRoom
    disk: BodyRoom

    @staticmethod
    def of(settings: Settings, *, available: int | None, one_tenant: bool) -> BodyRooms:
        """Return the room that the settings and the machine give.

        Args:
            settings: what they say counts.
            available: bytes of memory there are; None: that is not known.
            one_tenant: whether there are no keys.
        """
        limits, pooling = settings.limits, settings.pooling
        share = MOST if available is None else min(MOST, available // SHARE_OF_MEMORY)
        in_memory = limits.bodies_bytes or max(LEAST_BODIES * limits.body_bytes, share)
        on_disk = pooling.uploads_bytes or UPLOADS * pooling.upload_bytes
        return BodyRooms(
            BodyRoom(int(limits.body_bytes), int(in_memory), "limits.bodies_bytes", one_tenant),
            BodyRoom(int(pooling.upload_bytes), int(on_disk), "pooling.uploads_bytes", one_tenant),
        )


class BodyBudget:
    """Bytes for the bodies of all requests, shared by the tenants that hold any.

    A tenant may always hold one body of the largest size, and more only as long as it leaves free as much as
    it holds: a newcomer always finds room, however many tenants there are.

    Args:
        room: how much there is; an attribute too.
        gauge: shows the bytes that are held.
        short: whether memory is short, so that no body may grow.
    """

    def __init__(self, room: BodyRoom, gauge: Gauge, *, short: Callable[[], bool] = lambda: False) -> None:
        self.room = room
        self._short = short
        self._held: Counter[str] = Counter()
        gauge.set_function(self._held.total)

    @contextmanager
    def lease(self, tenant: str) -> Iterator[BodyLease]:
        """Count one body until the end of the block, which is that of its request."""
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
            GatewayOverloaded: there is no room for anybody, or memory is short.
        """
        if self._short():
            raise GatewayOverloaded(retry_after_s=RETRY_AFTER_S)
        room, held = self.room, self._held[tenant] + size
        free = room.together - self._held.total() - size
        if free < 0:
            raise GatewayOverloaded(
                f"The bodies of all requests take their {_readable(room.together)} already (setting "
                f"{room.setting}); try again shortly.",
                retry_after_s=RETRY_AFTER_S,
            )
        if not room.one_tenant and held > max(room.each, free):
            raise RateLimited(
                f"The bodies of your requests under way take {_readable(self._held[tenant])}, which is your "
                f"share of {room.setting} now; try again when one of them is over.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._held[tenant] += size


class BodyLease:
    """What one request's body holds of a budget.

    Args:
        budget: of which.
        tenant: whose request it is.

    Attributes:
        size: bytes.
    """

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self.size = 0

    def take(self, size: int) -> None:
        """Count bytes that have come.

        Raises:
            RateLimited: the tenant holds its share already.
            GatewayOverloaded: there is no room for anybody, or memory is short.
        """
        if size:
            self._budget.take(self._tenant, size)
            self.size += size


def _readable(size: int) -> str:
    return ByteSize(size).human_readable()

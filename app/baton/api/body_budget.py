"""Bound what the bodies of all requests hold at once, and what those of one tenant may hold of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Gauge
from pydantic import ByteSize

from baton.errors import GatewayOverloaded, RateLimited
from baton.setting_groups import MIB, LimitSettings, PoolingSettings

RETRY_AFTER_S = 5
MOST = 2 * 1024 * MIB
"""Bytes, where the settings say nothing."""
SHARE_OF_MEMORY = 8
LEAST_BODIES = 4
"""Bodies of the largest size that there is room for, however little memory there is."""

UPLOADS = 8
"""Files of the largest size that there is room for, where the settings say nothing."""


def bodies_together(limits: LimitSettings, available: int | None) -> int:
    """Return the bytes that all bodies in memory may take together.

    Args:
        limits: the settings; what they say counts.
        available: bytes of memory there are; None: that is not known.
    """
    if limits.bodies_bytes is not None:
        return int(limits.bodies_bytes)
    share = MOST if available is None else min(MOST, available // SHARE_OF_MEMORY)
    return max(LEAST_BODIES * int(limits.body_bytes), share)


def uploads_together(pooling: PoolingSettings) -> int:
    """Return the bytes that all files sent as they are may take on disk together."""
    return int(pooling.uploads_bytes or UPLOADS * pooling.upload_bytes)


class BodyBudget:
    """Bytes for the bodies of all requests, shared by the tenants that hold any.

    Each tenant may hold `total / (others + 2)` bytes, where `others` counts the other tenants that hold
    any: as if one tenant more were there, so that a newcomer always finds room. A tenant that held more
    before others came keeps it, and gets no more.

    Args:
        total: bytes of all bodies together.
        setting: the name of the setting that says so, for error messages.
        gauge: shows the bytes that are held.
        short: whether memory is short, so that no body may grow.
    """

    def __init__(
        self, total: int, setting: str, gauge: Gauge, *, short: Callable[[], bool] = lambda: False
    ) -> None:
        self._total = total
        self._setting = setting
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
        if self._held.total() + size > self._total:
            raise GatewayOverloaded(
                f"The bodies of all requests take their {_readable(self._total)} already (setting "
                f"{self._setting}); try again shortly.",
                retry_after_s=RETRY_AFTER_S,
            )
        share = self._total // (len(self._held.keys() - {tenant}) + 2)
        if self._held[tenant] + size > share:
            raise RateLimited(
                f"The bodies of your requests under way take the {_readable(share)} that you may hold now "
                f"(a share of {self._setting}); try again when one of them is over.",
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

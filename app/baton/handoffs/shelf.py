"""The records of one gateway in memory: by id, by tenant in the order they were made, and until when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from baton.handoffs.record import HandoffRecord

GONE_REMEMBERED = 10_000


class Shelf:
    """Records and their lives.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[str, HandoffRecord] = {}
        self._deadlines: dict[str, float] = {}
        self._tenants: dict[str, dict[str, HandoffRecord]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, record: HandoffRecord) -> bool:
        return self._records.get(record.id) is record

    def keep(self, record: HandoffRecord, seconds: float) -> None:
        """Take a record in for so long; one that was forgotten here does not come back."""
        if record.id in self._gone or record.id in self._records:
            return
        self._records[record.id] = record
        self._tenants.setdefault(record.tenant, {})[record.id] = record
        self.live(record, seconds)

    def live(self, record: HandoffRecord, seconds: float) -> None:
        """Let a record live so long from now, if it is still here."""
        if record in self:
            self._deadlines[record.id] = self._clock() + seconds

    def forget(self, record: HandoffRecord) -> None:
        """Take a record out, for good."""
        self._gone[record.id] = None
        if len(self._gone) > GONE_REMEMBERED:
            self._gone.popitem(last=False)
        self.drop(record)

    def drop(self, record: HandoffRecord) -> None:
        """Take a record out; it may come back from its file."""
        if self._records.pop(record.id, None) is None:
            return
        self._deadlines.pop(record.id, None)
        mine = self._tenants[record.tenant]
        del mine[record.id]
        if not mine:
            del self._tenants[record.tenant]

    def find(self, handoff_id: str) -> HandoffRecord | None:
        """The record of that id, if its time is not over."""
        record = self._records.get(handoff_id)
        return record if record is not None and self._deadlines[handoff_id] > self._clock() else None

    def over(self) -> list[HandoffRecord]:
        """Those whose time is over."""
        now = self._clock()
        return [self._records[found] for found, deadline in self._deadlines.items() if deadline <= now]

    def of(self, tenant: str) -> Iterator[HandoffRecord]:
        """A tenant's, the oldest first; also those whose time has just run out."""
        return iter(list(self._tenants.get(tenant, {}).values()))

    def oldest_with_images(self, newest: HandoffRecord) -> HandoffRecord | None:
        """The oldest handoff with images, and no pin, of the tenant whose take most; None: there is none.

        Args:
            newest: the one that room is made for.
        """
        loose = {
            tenant: [each for each in mine.values() if each.images and not each.pin and each is not newest]
            for tenant, mine in self._tenants.items()
        }
        most = max(loose.values(), key=lambda mine: sum(each.image_bytes for each in mine), default=[])
        return most[0] if most else None

    @property
    def tenants(self) -> list[str]:
        """Those who have any."""
        return list(self._tenants)

    def count(self, tenant: str) -> int:
        """How many a tenant has."""
        return len(self._tenants.get(tenant, {}))

"""The records of one gateway in memory: by id, by tenant in the order they were made, and until when."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from baton.handoffs.record import HandoffRecord, Holding

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
        self._beside: Counter[str] = Counter()
        self._counted: dict[str, int] = {}
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
        self.count_bytes(record)

    def live(self, record: HandoffRecord, seconds: float) -> None:
        """Let a record live so long from now, if it is still here."""
        if record in self:
            self._deadlines[record.id] = self._clock() + seconds

    def count_bytes(self, record: HandoffRecord) -> None:
        """Count what a record takes on disk beside its KV, as it is now."""
        if record in self:
            size = record.disk_bytes + record.image_bytes if record.kept else 0
            self._beside[record.tenant] += size - self._counted.get(record.id, 0)
            self._counted[record.id] = size

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
        self._beside[record.tenant] -= self._counted.pop(record.id, 0)
        mine = self._tenants[record.tenant]
        del mine[record.id]
        if not mine:
            del self._tenants[record.tenant], self._beside[record.tenant]

    def known(self, handoff_id: str) -> HandoffRecord | None:
        """The record of that id, also when its time has just run out."""
        return self._records.get(handoff_id)

    def find(self, handoff_id: str) -> HandoffRecord | None:
        """The record of that id, if its time is not over."""
        record = self._records.get(handoff_id)
        return record if record is not None and self._deadlines[handoff_id] > self._clock() else None

    def over(self) -> list[HandoffRecord]:
        """Those whose time is over."""
        now = self._clock()
        return [self._records[found] for found, deadline in self._deadlines.items() if deadline <= now]

    def of(self, tenant: str) -> list[HandoffRecord]:
        """A tenant's, the oldest first; also those whose time has just run out."""
        return sorted(self._tenants.get(tenant, {}).values(), key=lambda record: record.created_at)

    def unkept(self, but: HandoffRecord) -> list[Holding]:
        """What the others hold that are not on disk, where other gateways would see them."""
        return [record.holding for record in self._records.values() if not record.kept and record is not but]

    def oldest_beside(self, newest: HandoffRecord | None) -> HandoffRecord | None:
        """The oldest handoff on disk, and not pinned, of the tenant whose records and images take most;
        None: there is none.

        Args:
            newest: the one that room is made for.
        """
        for tenant, _ in self._beside.most_common():
            mine = self._tenants[tenant].values()
            loose = [each for each in mine if each.kept and not each.pin and each is not newest]
            if loose:
                return min(loose, key=lambda each: each.created_at)
        return None

    def loose_bytes(self, newest: HandoffRecord | None) -> int:
        """Bytes on disk, beside their KV, of all handoffs that may be evicted for `newest`."""
        return sum(
            self._counted.get(each.id, 0)
            for each in self._records.values()
            if each.kept and not each.pin and each is not newest
        )

    @property
    def tenants(self) -> list[str]:
        """Those who have any."""
        return list(self._tenants)

    def count(self, tenant: str) -> int:
        """How many a tenant has."""
        return len(self._tenants.get(tenant, {}))

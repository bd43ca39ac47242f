"""Index the handoffs of one gateway in memory: by id, by tenant, and by when they expire."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence

from baton.library.handoff import BLOCK, Footprint, Handoff, HandoffState, common_tokens
from baton.library.prefixes import PrefixIndex

FORGOTTEN_IDS = 10_000
"""Most ids of forgotten handoffs that are remembered, so that a late file does not bring one back."""


SUPERSEDED_FOR_S = 30.0
"""An automatic handoff lives so long after one that continues it was saved."""
SHARED_FOR_S = 600.0
"""The same where gateways share a store: another may have no more of the context than this."""
INDEX_BYTES = 12
"""Bytes that a token of a context takes in the index of prefixes, about."""


class HandoffIndex:
    """Records with their deadlines.

    Args:
        clock: monotonic seconds.
        automatic: whether requests look for contexts by their prefixes.
        is_elsewhere: returns whether a record's KV is on other machines alone; None: there are none.

    Attributes:
        prefixes: the contexts whose KV is stored, by the prefixes that prompts may share with them.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        automatic: bool = True,
        is_elsewhere: Callable[[Handoff], bool] | None = None,
    ) -> None:
        self.prefixes = PrefixIndex()
        self._automatic = automatic
        self._is_elsewhere = is_elsewhere
        self._clock = clock
        self._records: dict[str, Handoff] = {}
        self._deadlines: dict[str, float] = {}
        self._superseded: set[str] = set()
        self._tenants: dict[str, dict[str, Handoff]] = {}
        self._by_age: dict[str, list[tuple[float, str]]] = {}
        self._non_kv_bytes: Counter[str] = Counter()
        self._counted: dict[str, int] = {}
        self._forgotten: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, record: Handoff) -> bool:
        return self._records.get(record.id) is record

    def add(self, record: Handoff, seconds: float) -> None:
        """Add a record that expires in `seconds`; one that was forgotten stays out."""
        if record.id in self._forgotten or record.id in self._records:
            return
        self._records[record.id] = record
        self._tenants.setdefault(record.tenant, {})[record.id] = record
        if not record.automatic:
            insort(self._by_age.setdefault(record.tenant, []), _age(record))
        self.expire_in(record, seconds)
        self.count_bytes(record)

    def expire_in(self, record: Handoff, seconds: float) -> None:
        """Set a record's deadline to `seconds` from now, if it is still in the index."""
        if record in self:
            self._deadlines[record.id] = self._clock() + seconds

    def publish(self, record: Handoff) -> None:
        """Show a ready record to prompts, or hide one whose KV is gone.

        KV with latent steps, or that was moved, is only for requests that name it: it is not that of its
        token ids.
        """
        if self._records.get(record.id) is not record or not self._automatic:
            return
        hidden = record.latent_steps > 0 or not record.exact
        if record.state is not HandoffState.READY or not record.bytes or hidden:
            self.prefixes.remove(record)
            return
        self.prefixes.add(record)
        for each in self.prefixes.continued_by(record):
            if _supersedes(record, each):
                self._supersede(each, [record])
        if longer := [each for each in self.prefixes.continuing(record) if _supersedes(each, record)]:
            self._supersede(record, longer)

    def _supersede(self, record: Handoff, longer: Sequence[Handoff]) -> None:
        """Expire an automatic record soon that others continue; a request may be about to load it.

        It is found until then if it is on this machine and all of these are elsewhere: there is no more of
        the context here.
        """
        elsewhere, seconds = self._is_elsewhere, SHARED_FOR_S
        if elsewhere is None:
            elsewhere, seconds = lambda _: False, SUPERSEDED_FOR_S
        if elsewhere(record) or not all(map(elsewhere, longer)):
            self.prefixes.remove(record)
        self._superseded.add(record.id)
        self._deadlines[record.id] = min(self._deadlines[record.id], self._clock() + seconds)

    def beginning_like(self, record: Handoff) -> list[Handoff]:
        """Return the other records of a tenant and of the same weights whose contexts begin like one."""
        tokens = record.distinct_tokens
        return [
            each
            for each in self._tenants.get(record.tenant, {}).values()
            if each.id != record.id
            and each.weights == record.weights
            and common_tokens(each.distinct_tokens, tokens) >= BLOCK
        ]

    def relatives(self, record: Handoff) -> list[Handoff]:
        """Return the automatic records that continue a record, or that it continues."""
        found = [*self.prefixes.continued_by(record), *self.prefixes.continuing(record)]
        return [each for each in found if each.automatic]

    def with_translations(self, record: Handoff) -> list[Handoff]:
        """Return a record and all that hold its text, translations of translations too."""
        return self._made_from(record, lambda each: [each.translated_from] if each.translated_from else [])

    def blended_from(self, record: Handoff) -> list[Handoff]:
        """Return the records that may hold moved KV of a record, and those that continue these."""
        return self._made_from(record, lambda each: [] if each.exact else each.parents)[1:]

    def _made_from(self, record: Handoff, origins: Callable[[Handoff], Sequence[str]]) -> list[Handoff]:
        """Return a record, those of its tenant that were made from it, those made from these, and so on.

        Args:
            origins: returns the ids of the records that one was made from.
        """
        made: defaultdict[str, list[Handoff]] = defaultdict(list)
        for each in self._tenants.get(record.tenant, {}).values():
            for origin in origins(each):
                made[origin].append(each)
        found = {record.id: record}
        waiting = [record]
        while waiting:
            new = [each for each in made[waiting.pop().id] if each.id not in found]
            found |= {each.id: each for each in new}
            waiting += new
        return list(found.values())

    def translations_of(self, record: Handoff) -> list[Handoff]:
        """Return the records that hold the text of a record of other weights."""
        mine = self._tenants.get(record.tenant, {}).values()
        return [each for each in mine if each.translated_from == record.id]

    def keyed(self, tenant: str, cache_key: str) -> list[Handoff]:
        """Return a tenant's automatic records with a key that prompts can find, the newest first.

        One that another continues is left out, wherever that is.
        """
        mine = self._tenants.get(tenant, {}).values()
        found = [each for each in mine if each.automatic and each.cache_key == cache_key]
        last = [each for each in found if each in self.prefixes and each.id not in self._superseded]
        there = [each for each in last if self.find(each.id) is each]
        return sorted(there, key=_age, reverse=True)

    def weight_of(self, record: Handoff) -> int:
        """Return the bytes that a record takes in memory, about, with its share of the index."""
        return record.weight + (INDEX_BYTES * len(record.tokens) if record in self.prefixes else 0)

    def automatic_records(self) -> list[Handoff]:
        """Return the automatic records that prompts can find."""
        return [each for each in self._records.values() if each.automatic and each in self.prefixes]

    def count_bytes(self, record: Handoff) -> None:
        """Update how many bytes a record and its images take on disk."""
        if record in self:
            size = record.disk_bytes + record.image_bytes if record.on_disk else 0
            self._non_kv_bytes[record.tenant] += size - self._counted.get(record.id, 0)
            self._counted[record.id] = size

    def forget(self, record: Handoff) -> None:
        """Take a record out for good."""
        self._forgotten[record.id] = None
        if len(self._forgotten) > FORGOTTEN_IDS:
            self._forgotten.popitem(last=False)
        self.drop(record)

    def evict(self, record: Handoff) -> None:
        """Take a record out that was evicted here; an archived one may be looked up again."""
        if record.archived:
            self.drop(record)
        else:
            self.forget(record)

    def drop(self, record: Handoff) -> None:
        """Take a record out; it may be added again from its file."""
        if (known := self._records.pop(record.id, None)) is None:
            return
        self.prefixes.remove(record)
        self._deadlines.pop(record.id, None)
        self._superseded.discard(record.id)
        self._non_kv_bytes[record.tenant] -= self._counted.pop(record.id, 0)
        mine = self._tenants[record.tenant]
        del mine[record.id]
        if not record.automatic:
            ages = self._by_age[record.tenant]
            ages.pop(bisect_left(ages, _age(known)))
        if not mine:
            del self._tenants[record.tenant], self._non_kv_bytes[record.tenant]
            self._by_age.pop(record.tenant, None)

    def known(self, handoff_id: str) -> Handoff | None:
        """Return the record with an id, even if it has just expired."""
        return self._records.get(handoff_id)

    def find(self, handoff_id: str) -> Handoff | None:
        """Return the record with an id, unless it has expired."""
        record = self._records.get(handoff_id)
        return record if record is not None and self._deadlines[handoff_id] > self._clock() else None

    def expired(self) -> list[Handoff]:
        """Return the records that have expired."""
        now = self._clock()
        return [self._records[found] for found, deadline in self._deadlines.items() if deadline <= now]

    def newest(self, tenant: str, after: Handoff | None) -> Iterator[Handoff]:
        """Yield the records that a tenant's clients made, the newest first, some of which have just expired.

        What precedes a page costs no time, however much it is.

        Args:
            after: begin behind this record; None: with the newest.
        """
        ages = self._by_age.get(tenant, [])
        end = bisect_left(ages, _age(after)) if after is not None else len(ages)
        for at in range(end - 1, -1, -1):
            yield self._records[ages[at][1]]

    def by_eviction(self, tenant: str) -> list[Handoff]:
        """Return a tenant's records in the order in which they are evicted.

        Automatic ones go first, and of these the ones that others continue.
        """
        return sorted(self._tenants.get(tenant, {}).values(), key=self._eviction_order)

    def _eviction_order(self, record: Handoff) -> tuple[bool, bool, float]:
        return not record.automatic, record.id not in self._superseded, record.created_at

    def unsaved_footprints(self, but: Handoff) -> list[Footprint]:
        """Return the usage of the records that are in memory only, which other gateways do not see."""
        return [
            record.footprint for record in self._records.values() if not record.on_disk and record is not but
        ]

    def next_evictable(self, newest: Handoff | None) -> Handoff | None:
        """Return the handoff on disk to evict first, of the tenant whose records and images take most.

        It is not pinned.

        Args:
            newest: the handoff that space is needed for; it is not evicted. For an automatic one only others
                of these are.

        Returns:
            None: no handoff may be evicted.
        """
        for tenant, _ in self._non_kv_bytes.most_common():
            evictable = [each for each in self._tenants[tenant].values() if _may_go(each, newest)]
            if evictable:
                return min(evictable, key=self._eviction_order)
        return None

    def evictable_bytes(self, newest: Handoff | None) -> int:
        """Return the bytes of records and images of all handoffs that may be evicted for `newest`."""
        return sum(self._counted.get(each.id, 0) for each in self._records.values() if _may_go(each, newest))

    @property
    def tenants(self) -> list[str]:
        """The tenants that have records."""
        return list(self._tenants)

    def count(self, tenant: str) -> int:
        """Return how many records a tenant has."""
        return len(self._tenants.get(tenant, {}))


def _age(record: Handoff) -> tuple[float, str]:
    return record.created_at, record.id


def _may_go(record: Handoff, newest: Handoff | None) -> bool:
    """Return whether a record may be evicted for another one."""
    asked_for = newest is not None and newest.automatic and not record.automatic
    return record.on_disk and not record.pin and record is not newest and not asked_for


def _supersedes(record: Handoff, other: Handoff) -> bool:
    """Return whether a record makes an automatic one superfluous, all of which it begins with."""
    lasts = record.on_disk or not other.on_disk
    return other.automatic and record.model == other.model and lasts and record.expires_at >= other.expires_at

"""Choose which entries of a store are evicted; the files themselves are not touched here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from baton_kv.stores.base import StoreFull
from baton_kv.stores.listing import StoredEntry


def to_fit_budget(
    entries: Sequence[StoredEntry], size: int, *, beside: int, budget: int, replaced: tuple[str, str] | None
) -> list[StoredEntry]:
    """Choose the entries to evict so that `size` more bytes fit the budget.

    Args:
        entries: all entries of the store.
        size: bytes of the entry to be written.
        beside: bytes of other files that count towards the budget.
        budget: bytes that all of them may take.
        replaced: scope and file name of an entry that is overwritten, whose bytes do not count; or None.

    Raises:
        StoreFull: the bytes do not fit even if all unpinned entries are evicted.
    """
    others = [each for each in entries if (each.scope, each.name) != replaced]
    total = beside + sum(each.size for each in others)
    if total + size <= budget:
        return []
    evictable = [each for each in _in_order(entries, budget) if (each.scope, each.name) != replaced]
    if size + total - sum(each.size for each in evictable) > budget:
        raise StoreFull(f"an entry of {size} bytes does not fit the store's budget of {budget}")
    return list(_until(evictable, total + size - budget))


def to_free(entries: Sequence[StoredEntry], size: int, *, budget: int | None) -> list[StoredEntry] | None:
    """Choose the entries to evict to free `size` bytes on the device.

    Args:
        entries: all entries of the store.
        size: bytes to free.
        budget: the store's budget in bytes, from which the tenants' fair share follows.

    Returns:
        The entries, or None if all unpinned entries together are smaller.
    """
    evictable = _in_order(entries, budget)
    if sum(each.size for each in evictable) < size:
        return None
    return list(_until(evictable, size))


def _in_order(entries: Sequence[StoredEntry], budget: int | None) -> list[StoredEntry]:
    """Order the unpinned entries: scopes above their fair share first, then the least recently used."""
    held: Counter[str] = Counter()
    for each in entries:
        held[each.scope] += each.size
    share = (budget or held.total()) / max(1, len(held))
    unpinned = [each for each in entries if not each.pinned]
    return sorted(unpinned, key=lambda each: (held[each.scope] <= share, each.used_ns))


def _until(entries: Sequence[StoredEntry], size: int) -> Iterator[StoredEntry]:
    """Yield the first entries that together have at least `size` bytes."""
    for each in entries:
        if size <= 0:
            return
        yield each
        size -= each.size

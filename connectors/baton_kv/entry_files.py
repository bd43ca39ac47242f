"""Name the files that an entry needs, from its description alone; nothing is verified."""

from __future__ import annotations

import struct

from baton_kv.entry_format import DIGEST_BYTES
from baton_kv.entry_layout import EntryLayout
from baton_kv.stores.base import Reader, StoreError


def shared_keys(reader: Reader) -> tuple[str, ...]:
    """Return the keys of the entries whose files an entry needs too, in order.

    Args:
        reader: its own file.

    Raises:
        StoreError: the file is not an entry.
    """
    try:
        layout, _ = EntryLayout.read(reader)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        raise StoreError("the entry's description cannot be read") from None
    return tuple(part.key for part in layout.description.parts)


def seal_of(reader: Reader) -> str:
    """Return the digest at the end of an entry's file, hexadecimal: no other entry has the same.

    Args:
        reader: the file.
    """
    return reader.read(len(reader) - DIGEST_BYTES, len(reader)).hex()

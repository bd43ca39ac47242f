"""Write KV entries, as one stream or by several ranks into one file; `entry_format` defines the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy

from baton_kv.entry_format import DIGEST_BYTES, EntryDescription, digest_of, entry_digest
from baton_kv.entry_layout import EntryLayout
from baton_kv.stores.base import Draft, Piece, StoreError

SlabReader = Callable[[int, range, range], list[memoryview]]
"""Takes a layer, some heads of the whole model and some blocks of the context. Returns their slabs, by head
and block, valid until the next call."""


def write(
    description: EntryDescription, tokens: Sequence[int], slabs: SlabReader, secret: bytes
) -> Iterator[Piece]:
    """Yield the pieces of an entry's file, in order.

    Args:
        description: the entry's description.
        tokens: every token id of the context.
        slabs: returns slabs, each `slab_bytes` long; called once a run.
        secret: the store's secret, 32 bytes.
    """
    ids = numpy.asarray(tokens, dtype="<i4").tobytes()
    yield EntryLayout(description).header
    yield ids
    digests = bytearray()
    for layer, shape in enumerate(description.layers):
        for index in range(description.runs(layer)):
            blocks = description.run(layer, index)
            parts = slabs(layer, range(shape.heads), blocks)
            digests += b"".join(chunk_digests(parts, len(blocks), secret))
            yield parts
    yield digests
    yield entry_digest(description.canonical(), ids, bytes(digests), secret)


def write_share(
    draft: Draft,
    description: EntryDescription,
    heads: Callable[[int], range],
    slabs: SlabReader,
    secret: bytes,
) -> None:
    """Write one rank's share of an entry: the slabs and digests of some heads of each layer.

    Args:
        draft: the entry's file, which other ranks write too.
        description: the entry's description, the same for all ranks.
        heads: returns the heads of a layer that this rank writes; each head is written by exactly one rank.
        slabs: as for `write`.
        secret: the store's secret, 32 bytes.
    """
    layout = EntryLayout(description)
    for layer in range(len(description.layers)):
        mine = heads(layer)
        for index in range(description.runs(layer)) if mine else ():
            blocks = description.run(layer, index)
            parts = slabs(layer, mine, blocks)
            digests = list(chunk_digests(parts, len(blocks), secret))
            draft.write_at(layout.slab(layer, index, mine.start, blocks.start), parts)
            draft.write_at(layout.chunk_digest(layer, index, mine.start), digests)


def chunk_digests(slabs: Sequence[memoryview], blocks: int, secret: bytes) -> Iterator[bytes]:
    """Yield the digest of each head's chunk, of slabs in the order of a `SlabReader`."""
    for start in range(0, len(slabs), blocks):
        yield digest_of(secret, *slabs[start : start + blocks])


def seal(draft: Draft, description: EntryDescription, tokens: Sequence[int], secret: bytes) -> None:
    """Complete an entry after all ranks have written their shares: header, token ids and digest.

    Raises:
        StoreError: a rank has not written its share into this draft.
    """
    layout = EntryLayout(description)
    ids = numpy.asarray(tokens, dtype="<i4").tobytes()
    digests = draft.read(layout.digests, layout.digest)
    rows = numpy.frombuffer(digests, numpy.uint8).reshape(-1, DIGEST_BYTES)
    if not rows.any(axis=1).all():
        raise StoreError("a rank's share of the draft is missing")
    draft.write_at(0, [layout.header, ids])
    draft.write_at(layout.digest, [entry_digest(description.canonical(), ids, digests, secret)])

"""Write KV entries, as one stream or by several ranks into one file; `entry_format` defines the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy

from baton_kv.entry_format import DIGEST_BYTES, EntryDescription, EntryLayout, digest_of, entry_digest
from baton_kv.stores.base import Buffer, Draft, StoreError

SlabReader = Callable[[int, int, slice], Sequence[memoryview]]
"""Takes a layer, a head of the whole model and a range of the entry's blocks; returns a slab a block."""


def write(
    description: EntryDescription, tokens: Sequence[int], slabs: SlabReader, secret: bytes
) -> Iterator[Buffer]:
    """Yield the parts of an entry's file, in order.

    Args:
        description: the entry's description.
        tokens: every token id of the context.
        slabs: returns slabs of a head, each `slab_bytes` long; called once a chunk.
        secret: the store's secret, 32 bytes.
    """
    ids = numpy.asarray(tokens, dtype="<i4").tobytes()
    yield EntryLayout(description).header
    yield ids
    digests = bytearray()
    for layer, shape in enumerate(description.layers):
        for head in range(shape.heads):
            for index in range(description.chunks(layer)):
                parts = slabs(layer, head, description.chunk(layer, index))
                digests += digest_of(secret, *parts)
                yield from parts
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
        for head in heads(layer):
            for index in range(description.chunks(layer)):
                blocks = description.chunk(layer, index)
                parts = slabs(layer, head, blocks)
                draft.write_at(layout.slab(layer, head, blocks.start), parts)
                draft.write_at(layout.chunk_digest(layer, head, index), [digest_of(secret, *parts)])


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

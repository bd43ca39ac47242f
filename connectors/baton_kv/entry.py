"""Open stored KV entries and verify their digests, and write them; `format` defines the file."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import numpy

from baton_kv.format import (
    DIGEST_BYTES,
    EntryDescription,
    EntryIncompatible,
    EntryInvalid,
    EntryLayout,
    Tokens,
    digest_of,
    entry_digest,
)
from baton_kv.stores.base import Draft, Piece, Reader, StoreError

SlabReader = Callable[[int, range, range], list[memoryview]]
"""Takes a layer, some heads of the whole model and some blocks of the context. Returns their slabs, by head
and block, valid until the next call."""


class Entry:
    """An open entry whose description, token ids and chunk digests are verified; slabs are verified as read.

    Args:
        secret: the store's secret, 32 bytes.
        part: its index among the parts of the entry that is loaded, which exceptions name; None: it is that
            entry.

    Attributes:
        description: the entry's description.
        digest: digest of description, token ids and chunk digests, hexadecimal.
        tokens: every token id of the context, int32 (tokens,).

    Raises:
        EntryInvalid: the file is truncated, corrupt or forged, or was saved under another key.
        EntryIncompatible: another version of this format wrote the file.
    """

    def __init__(self, reader: Reader, key: str, secret: bytes, part: int | None = None) -> None:
        self._part = part
        try:
            self._layout, text = EntryLayout.read(reader)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise self._invalid(f"the header cannot be read ({type(error).__name__})") from None
        self._reader = reader
        self._secret = secret
        layout = self._layout
        self.description = layout.description
        if len(reader) != layout.size:
            raise self._invalid(f"the file has {len(reader)} bytes, its header announces {layout.size}")
        try:
            tokens = reader.read(layout.tokens, layout.tokens + 4 * self.description.tokens)
            self._digests = reader.read(layout.digests, layout.digest)
        except MemoryError:
            raise self._invalid("its token ids and digests do not fit in memory") from None
        digest = entry_digest(text, tokens, self._digests, secret)
        if digest != reader.read(layout.digest, layout.size):
            raise self._invalid("the description does not match its digest")
        if self.description.key != key:
            raise self._invalid("the entry was saved under another key")
        self.digest = digest.hex()
        self.tokens: Tokens = numpy.frombuffer(tokens, dtype="<i4")

    def require(self, *fingerprints: str) -> None:
        """Refuse an entry of another model, layout or version.

        Raises:
            EntryIncompatible: the entry's fingerprint is none of these.
        """
        if self.description.fingerprint not in fingerprints:
            raise EntryIncompatible("the entry was saved with another model, layout or version")

    def _invalid(self, reason: str) -> EntryInvalid:
        return EntryInvalid(reason, self._part)

    def run(
        self, layer: int, index: int, heads: range | None = None, buffer: memoryview | None = None
    ) -> memoryview:
        """Read and verify the chunks of some heads in one run; return their bytes, head by head.

        Args:
            heads: numbers of the KV heads in the whole model; None for all.
            buffer: memory to read into, at least as long as these chunks; None allocates it.

        Raises:
            EntryInvalid: the bytes do not match their digests.
        """
        shape = self.description.layers[layer]
        heads = range(shape.heads) if heads is None else heads
        blocks = self.description.run(layer, index)
        size = len(blocks) * shape.slab_bytes
        data = (memoryview(bytearray(len(heads) * size)) if buffer is None else buffer)[: len(heads) * size]
        self.read_slabs(layer, index, heads.start, blocks.start, [data])
        for position, head in enumerate(heads):
            at = self._layout.chunk_digest(layer, index, head) - self._layout.digests
            chunk = data[position * size : (position + 1) * size]
            if digest_of(self._secret, chunk) != self._digests[at : at + DIGEST_BYTES]:
                raise self._invalid(f"run {index} of head {head} of layer {layer} does not match its digest")
        return data

    def read_slabs(
        self, layer: int, index: int, head: int, block: int, buffers: Sequence[memoryview]
    ) -> None:
        """Fill the buffers with slabs from one on, in the order of the file, without verifying them.

        The first is that of KV head `head` of the whole model and block `block` of the context, in the run.

        Raises:
            EntryInvalid: the file ends before the buffers are full.
        """
        start = self._layout.slab(layer, index, head, block)
        if self._reader.read_into(start, buffers) != sum(map(len, buffers)):
            raise self._invalid(f"the file ends within layer {layer}")


def write(
    description: EntryDescription, tokens: Sequence[int], slabs: SlabReader, secret: bytes
) -> Iterator[Piece]:
    """Yield the pieces of an entry's file, in order; `slabs` is called once a run."""
    ids = numpy.asarray(tokens, dtype="<i4").tobytes()
    yield EntryLayout(description).header
    yield ids
    digests = bytearray()
    for layer, shape in enumerate(description.layers):
        for index in range(description.runs(layer)):
            blocks = description.run(layer, index)
            parts = slabs(layer, range(shape.heads), blocks)
            digests += b"".join(_chunk_digests(parts, len(blocks), secret))
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
        secret: the store's secret, 32 bytes.
    """
    layout = EntryLayout(description)
    for layer in range(len(description.layers)):
        mine = heads(layer)
        for index in range(description.runs(layer)) if mine else ():
            blocks = description.run(layer, index)
            parts = slabs(layer, mine, blocks)
            digests = list(_chunk_digests(parts, len(blocks), secret))
            draft.write_at(layout.slab(layer, index, mine.start, blocks.start), parts)
            draft.write_at(layout.chunk_digest(layer, index, mine.start), digests)


def _chunk_digests(slabs: Sequence[memoryview], blocks: int, secret: bytes) -> Iterator[bytes]:
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

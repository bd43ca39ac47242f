"""Open a stored KV entry and verify its digests; `entry_format` defines the file."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy

from baton_kv.entry_format import (
    DIGEST_BYTES,
    EntryIncompatible,
    EntryInvalid,
    Tokens,
    digest_of,
    entry_digest,
)
from baton_kv.entry_layout import EntryLayout
from baton_kv.stores.base import Reader


class Entry:
    """An open entry whose description, token ids and chunk digests are verified; slabs are verified as read.

    Args:
        reader: the open file.
        key: the key under which it was opened.
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
            layer: index of the layer.
            index: index of the run.
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

        Args:
            layer: index of the layer.
            index: index of the run.
            head: number of the KV head in the whole model.
            block: index of the block in the context.
            buffers: memory to read into.

        Raises:
            EntryInvalid: the file ends before the buffers are full.
        """
        start = self._layout.slab(layer, index, head, block)
        if self._reader.read_into(start, buffers) != sum(map(len, buffers)):
            raise self._invalid(f"the file ends within layer {layer}")

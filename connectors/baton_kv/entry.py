"""Open a stored KV entry and verify its digests; `entry_format` defines the file."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy

from baton_kv.entry_format import (
    DIGEST_BYTES,
    EntryIncompatible,
    EntryInvalid,
    EntryLayout,
    Tokens,
    digest_of,
    entry_digest,
    read_header,
)
from baton_kv.stores.base import Reader


class Entry:
    """An open entry whose description, token ids and chunk digests are verified; slabs are verified as read.

    Args:
        reader: the open file.
        key: the key under which it was opened.
        secret: the store's secret, 32 bytes.

    Attributes:
        description: the entry's description.
        digest: digest of description, token ids and chunk digests, hexadecimal.
        tokens: every token id of the context, int32 (tokens,).

    Raises:
        EntryInvalid: the file is truncated, corrupt or forged, or was saved under another key.
        EntryIncompatible: another version of this format wrote the file.
    """

    def __init__(self, reader: Reader, key: str, secret: bytes) -> None:
        try:
            self.description, start = read_header(reader)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise EntryInvalid(f"the header cannot be read ({type(error).__name__})") from None
        self._reader = reader
        self._secret = secret
        self._layout = layout = EntryLayout.read(self.description, start)
        if len(reader) != layout.size:
            raise EntryInvalid(f"the file has {len(reader)} bytes, its header announces {layout.size}")
        try:
            tokens = reader.read(layout.tokens, layout.tokens + 4 * self.description.tokens)
            self._digests = reader.read(layout.digests, layout.digest)
        except MemoryError:
            raise EntryInvalid("its token ids and digests do not fit in memory") from None
        digest = entry_digest(self.description.canonical(), tokens, self._digests, secret)
        if digest != reader.read(layout.digest, layout.size):
            raise EntryInvalid("the description does not match its digest")
        if self.description.key != key:
            raise EntryInvalid("the entry was saved under another key")
        self.digest = digest.hex()
        self.tokens: Tokens = numpy.frombuffer(tokens, dtype="<i4")

    def require(self, fingerprint: str) -> None:
        """Refuse an entry of another model, layout or version.

        Raises:
            EntryIncompatible: the entry's fingerprint is not `fingerprint`.
        """
        if self.description.fingerprint != fingerprint:
            raise EntryIncompatible("the entry was saved with another model, layout or version")

    def chunk(self, layer: int, head: int, index: int, buffer: memoryview | None = None) -> memoryview:
        """Read and verify one chunk; return its bytes.

        Args:
            layer: index of the layer.
            head: number of the KV head in the whole model.
            index: index of the chunk among those of the head.
            buffer: memory to read into, at least `chunk_blocks * slab_bytes` long; None allocates it.

        Raises:
            EntryInvalid: the bytes do not match the chunk's digest.
        """
        blocks = self.description.chunk(layer, index)
        size = (blocks.stop - blocks.start) * self.description.layers[layer].slab_bytes
        data = (memoryview(bytearray(size)) if buffer is None else buffer)[:size]
        self.read_slabs(layer, head, blocks.start, [data])
        at = self._layout.chunk_digest(layer, head, index) - self._layout.digests
        if digest_of(self._secret, data) != self._digests[at : at + DIGEST_BYTES]:
            raise EntryInvalid(f"chunk {index} of head {head} of layer {layer} does not match its digest")
        return data

    def read_slabs(self, layer: int, head: int, first: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with a head's slabs from block `first` on, without verifying them.

        Raises:
            EntryInvalid: the file ends before the buffers are full.
        """
        start = self._layout.slab(layer, head, first)
        if self._reader.read_into(start, buffers) != sum(map(len, buffers)):
            raise EntryInvalid(f"the file ends within layer {layer}")

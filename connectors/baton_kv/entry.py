"""Open stored KV entries and verify them, write them, and keep what was proved in memory.

`format` defines the file. What was proved once may stay (`Resident`), and is used again without another
proof. That is safe because nobody else could ever write it: it was copied into memory of this process alone
and proved there, or gathered there from the engine's own cache by the save that digested it. The file is
asked each time whether it is still that entry, by its digest: that covers key, tenant and model, so no other
entry has the same.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from baton_kv.contract import EXPENDABLE
from baton_kv.format import (
    DIGEST_BYTES,
    NONCE_BYTES,
    PAGE_BYTES,
    TAG_BYTES,
    TAG_ROW_BYTES,
    EntryDescription,
    EntryIncompatible,
    EntryInvalid,
    EntryLayout,
    Tokens,
    entry_digest,
    seal_of,
    tag_key,
)
from baton_kv.stores.base import Draft, Piece, Reader, StoreError

SlabReader = Callable[[int, range, range], list[memoryview]]
"""Takes a layer, some heads of the whole model and some blocks of the context. Returns their slabs, by head
and block, valid until the next call."""


@dataclass(frozen=True)
class Told:
    """An entry's description of itself, verified.

    Attributes:
        layout: where everything is in its file.
        tags: the tags of its chunks.
        digest: digest of description, token ids and tags, hexadecimal.
    """

    layout: EntryLayout
    tags: bytes
    digest: str


class Tags:
    """Makes and verifies the tags of chunks under a store's secret."""

    def __init__(self, secret: bytes) -> None:
        key = tag_key(secret)
        self._whole, self._parts = AESGCM(key), AES(key)

    def make(self, slabs: Sequence[memoryview]) -> bytes:
        """Return the row of a chunk in an entry's tags."""
        nonce = secrets.token_bytes(NONCE_BYTES)  # two chunks with one would give the key away
        tagger = Cipher(self._parts, GCM(nonce)).encryptor()
        for slab in slabs:
            tagger.authenticate_additional_data(slab)
        tagger.finalize()
        return (nonce + tagger.tag).ljust(TAG_ROW_BYTES, b"\0")

    def fits(self, row: bytes, chunk: memoryview) -> bool:
        """Return whether a row is that of this chunk."""
        nonce, tag = row[:NONCE_BYTES], row[NONCE_BYTES : NONCE_BYTES + TAG_BYTES]
        try:
            self._whole.decrypt(nonce, tag, chunk)  # of nothing, with the chunk as what is only authenticated
        except InvalidTag:
            return False
        return True


class Entry:
    """An open entry whose description, token ids and tags are verified; slabs are verified as read.

    Args:
        secret: the store's secret, 32 bytes.
        part: its index among the parts of the entry that is loaded, which exceptions name; None: it is that
            entry.
        told: what the entry with this file's digest has told before; None: it is read and verified now.

    Attributes:
        told: what it says of itself.
        description: the entry's description.
        digest: digest of description, token ids and tags, hexadecimal.
        tokens: every token id of the context, int32 (tokens,); none if it has told of itself before.

    Raises:
        EntryInvalid: the file is truncated, corrupt or forged, or was saved under another key.
        EntryIncompatible: another version of this format wrote the file. Never of a part, which an entry of
            this version names: that is corrupt.
    """

    def __init__(
        self, reader: Reader, key: str, secret: bytes, part: int | None = None, told: Told | None = None
    ) -> None:
        self._part = part
        self._reader = reader
        self._secret = secret
        self._tags = Tags(secret)
        self.tokens: Tokens = numpy.empty(0, numpy.int32)
        self.told = self._read() if told is None else told
        self.description = self.told.layout.description
        self.digest = self.told.digest
        if self.description.key != key:
            raise self._invalid("the entry was saved under another key")

    def _read(self) -> Told:
        """Read and verify all but the slabs."""
        reader = self._reader
        try:
            layout, text = EntryLayout.read(reader)
        except EntryIncompatible:
            if self._part is None:
                raise
            raise self._invalid("a part claims another version of the entry format") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise self._invalid(f"the header cannot be read ({type(error).__name__})") from None
        if len(reader) != layout.size:
            raise self._invalid(f"the file has {len(reader)} bytes, its header announces {layout.size}")
        try:
            tokens = reader.read(layout.tokens, layout.tokens + 4 * layout.description.tokens)
            tags = reader.read(layout.tags, layout.digest)
        except MemoryError:
            raise self._invalid("its token ids and tags do not fit in memory") from None
        digest = entry_digest(text, tokens, tags, self._secret)
        if digest != reader.read(layout.digest, layout.size):
            raise self._invalid("the description does not match its digest")
        self.tokens = numpy.frombuffer(tokens, dtype="<i4")
        return Told(layout, tags, digest.hex())

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
            EntryInvalid: the bytes do not match their tags.
        """
        shape = self.description.layers[layer]
        heads = range(shape.heads) if heads is None else heads
        blocks = self.description.run(layer, index)
        size = len(blocks) * shape.slab_bytes
        data = (memoryview(bytearray(len(heads) * size)) if buffer is None else buffer)[: len(heads) * size]
        self.read_slabs(layer, index, heads.start, blocks.start, [data])
        layout = self.told.layout
        for position, head in enumerate(heads):
            at = layout.tag(layer, index, head) - layout.tags
            chunk = data[position * size : (position + 1) * size]
            if not self._tags.fits(self.told.tags[at : at + TAG_ROW_BYTES], chunk):
                raise self._invalid(f"run {index} of head {head} of layer {layer} does not match its tag")
        return data

    def read_slabs(
        self, layer: int, index: int, head: int, block: int, buffers: Sequence[memoryview]
    ) -> None:
        """Fill the buffers with slabs from one on, in the order of the file, without verifying them.

        The first is that of KV head `head` of the whole model and block `block` of the context, in the run.

        Raises:
            EntryInvalid: the file ends before the buffers are full.
        """
        start = self.told.layout.slab(layer, index, head, block)
        if self._reader.read_into(start, buffers) != sum(map(len, buffers)):
            raise self._invalid(f"the file ends within layer {layer}")


Name = tuple[str, int | None]
"""A name of a file in the store: the key of an entry, and which file that it shares; None: its own."""


class Kept:
    """Runs of one entry's own file, of the heads that a rank holds, in memory.

    Attributes:
        place: the bytes of the whole memory that are its.
        key: the entry's key.
        told: what the entry says of itself; None: its file was not opened yet since it was saved.
        digest: its digest, hexadecimal; empty: nobody finds it yet.
        size: bytes of the entry's file.
        names: under which the store had the file: keys, and which shared file of theirs it is.
        users: number of loads and saves that use it.
        used: when it was used last, by the count of all uses.
    """

    def __init__(
        self, place: range, memory: memoryview, described: EntryDescription, heads: Sequence[int]
    ) -> None:
        self.place = place
        self.key = described.key
        self.told: Told | None = None
        self.digest, self.size = "", 0
        self.names: set[Name] = set()
        self.users, self.used = 1, 0
        self._memory = memory
        self._described = described
        self._heads = heads
        self._starts = [0, *itertools.accumulate(_layer_bytes(described, heads))]
        self._proved: set[tuple[int, int]] = set()

    @property
    def scope(self) -> str:
        """Return the tenant's part of its key."""
        return self.key.partition("/")[0]

    @property
    def held(self) -> int:
        """Return the bytes of the runs that are there."""
        return sum(len(self.room(layer, index)) for layer, index in self._proved)

    @property
    def whole(self) -> bool:
        """Return whether all its runs are there."""
        return len(self._proved) == sum(map(self._described.runs, range(len(self._heads))))

    def room(self, layer: int, index: int) -> memoryview:
        """Return the memory of one run; it is filled once, by one thread, before it is `added`."""
        described = self._described
        run, row = described.run(layer, index), self._heads[layer] * described.layers[layer].slab_bytes
        start = self._starts[layer] + (run.start - described.first(layer)) * row
        return self._memory[start : start + len(run) * row]

    def added(self, layer: int, index: int) -> None:
        """Note that a run was proved where it is."""
        self._proved.add((layer, index))

    def run(self, layer: int, index: int) -> memoryview | None:
        """Return the bytes of a run, to be read only; None if it is not there."""
        return self.room(layer, index).toreadonly() if (layer, index) in self._proved else None


def _layer_bytes(described: EntryDescription, heads: Sequence[int]) -> Iterator[int]:
    """Yield the bytes of each layer in an entry's own file, of so many heads."""
    for layer, count in enumerate(heads):
        yield count * described.layers[layer].slab_bytes * len(described.held_of(layer))


class Resident:
    """The proved KV of several entries in one piece of memory, whose size is their budget.

    What must go goes as in a store: first of scopes above their fair share, then what nobody asked to save,
    then what was not used for longest. Nothing goes while it is used, and for what nobody asked to save only
    such goes. What the store has under no name any more goes too (`sweep`).

    Args:
        memory: the memory; of no bytes: nothing is kept.
        heads: number of heads of each layer that this rank holds.
    """

    def __init__(self, memory: memoryview, heads: Sequence[int]) -> None:
        self._memory = memory
        self._heads = heads
        self._holes = [range(len(memory))]
        self._kept: dict[str, Kept] = {}
        self._uses = itertools.count(1)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._memory)

    def find(self, reader: Reader, key: str, name: Name) -> Kept | None:
        """Find what is kept of the entry that an open file says to be; it is used until `release`.

        What lacks a run has one user at a time, which may add it. `name` is what the file was opened by.
        """
        if not self._kept or len(reader) < DIGEST_BYTES:
            return None
        digest = seal_of(reader)
        with self._lock:
            kept = self._kept.get(digest)
            if kept is None or (kept.key, kept.size) != (key, len(reader)) or (kept.users and not kept.whole):
                return None
            kept.users += 1
            kept.used = next(self._uses)
            kept.names.add(name)
            return kept

    @contextmanager
    def room(self, described: EntryDescription) -> Iterator[Kept | None]:
        """Reserve memory for an entry for the time of the context, or until it goes if `keep` is called.

        None: there is no room for it.
        """
        with self._lock:
            place = self._reserve(sum(_layer_bytes(described, self._heads)), described.key)
        if place is None:
            yield None
            return
        kept = Kept(place, self._memory[place.start : place.stop], described, self._heads)
        try:
            yield kept
        finally:
            self.release(kept)

    def keep(self, kept: Kept, digest: str, size: int, name: Name) -> None:
        """Have an entry found from now on, in the place of others under its key."""
        with self._lock:
            if (there := self._kept.get(digest)) is not None:
                there.names.add(name)
                return
            kept.names.add(name)
            for each in [each for each in self._kept.values() if each.key == kept.key and not each.users]:
                self._drop(each)
            kept.digest, kept.size, kept.used = digest, size, next(self._uses)
            self._kept[digest] = kept

    def share(self, digest: str, name: Name) -> None:
        """Note another name of a file, of an entry that shares it."""
        with self._lock:
            if (kept := self._kept.get(digest)) is not None:
                kept.names.add(name)

    def sweep(self, exists: Callable[[str, int | None], bool]) -> None:
        """Drop what the store has under no name any more: it was deleted, has expired, or was evicted there.

        Args:
            exists: see `Store.exists`.
        """
        with self._lock:
            named = [(kept, tuple(kept.names)) for kept in self._kept.values()]
        for kept, names in named:
            gone = {name for name in names if not exists(*name)}
            with self._lock:
                kept.names -= gone
                if not kept.names and not kept.users and self._kept.get(kept.digest) is kept:
                    self._drop(kept)

    def release(self, kept: Kept) -> None:
        """Use an entry no longer."""
        with self._lock:
            kept.users -= 1
            if not kept.users and not kept.digest:
                self._free(kept.place)

    def _reserve(self, size: int, key: str) -> range | None:
        """Take memory, and drop what must go for it; None: it does not fit."""
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        while size <= len(self._memory):
            for number, hole in enumerate(self._holes):
                if len(hole) >= size:
                    self._holes[number] = hole[size:]
                    return hole[:size]
            if (least := self._least(size, key)) is None:
                break
            self._drop(least)
        return None

    def _least(self, size: int, key: str) -> Kept | None:
        """Return the entry that goes first for so many bytes under a key; None: none may go."""
        held = Counter({key.partition("/")[0]: size})
        for each in self._kept.values():
            held[each.scope] += len(each.place)
        share = len(self._memory) / len(held)
        gives_way = is_expendable(key)
        return min(
            (
                each
                for each in self._kept.values()
                if not each.users and (is_expendable(each.key) or not gives_way)
            ),
            key=lambda each: (held[each.scope] <= share, not is_expendable(each.key), each.used),
            default=None,
        )

    def _drop(self, kept: Kept) -> None:
        del self._kept[kept.digest]
        self._free(kept.place)

    def _free(self, place: range) -> None:
        """Give memory back, as one hole with those beside it."""
        holes: list[range] = []
        for hole in sorted([*filter(len, self._holes), place], key=lambda hole: hole.start):
            if holes and holes[-1].stop == hole.start:
                hole = range(holes.pop().start, hole.stop)
            holes.append(hole)
        self._holes = holes


def is_expendable(key: str) -> bool:
    """Return whether an entry is saved though no client asked for it."""
    return key.rpartition("/")[2].startswith(EXPENDABLE)


def write(
    description: EntryDescription, tokens: Sequence[int], slabs: SlabReader, secret: bytes
) -> Generator[Piece, None, str]:
    """Yield the pieces of an entry's file, in order, and return its digest; `slabs` is called once a run."""
    ids = numpy.asarray(tokens, dtype="<i4").tobytes()
    yield EntryLayout(description).header
    yield ids
    tags, tagger = bytearray(), Tags(secret)
    for layer, shape in enumerate(description.layers):
        for index in range(description.runs(layer)):
            blocks = description.run(layer, index)
            parts = slabs(layer, range(shape.heads), blocks)
            tags += b"".join(_rows(tagger, parts, len(blocks)))
            yield parts
    yield tags
    digest = entry_digest(description.canonical(), ids, bytes(tags), secret)
    yield digest
    return digest.hex()


def write_share(
    draft: Draft,
    description: EntryDescription,
    heads: Callable[[int], range],
    slabs: SlabReader,
    secret: bytes,
) -> None:
    """Write one rank's share of an entry: the slabs and tags of some heads of each layer.

    Args:
        draft: the entry's file, which other ranks write too.
        description: the entry's description, the same for all ranks.
        heads: returns the heads of a layer that this rank writes; each head is written by exactly one rank.
        secret: the store's secret, 32 bytes.
    """
    layout, tagger = EntryLayout(description), Tags(secret)
    for layer in range(len(description.layers)):
        mine = heads(layer)
        for index in range(description.runs(layer)) if mine else ():
            blocks = description.run(layer, index)
            parts = slabs(layer, mine, blocks)
            tags = list(_rows(tagger, parts, len(blocks)))
            draft.write_at(layout.slab(layer, index, mine.start, blocks.start), parts)
            draft.write_at(layout.tag(layer, index, mine.start), tags)


def _rows(tagger: Tags, slabs: Sequence[memoryview], blocks: int) -> Iterator[bytes]:
    """Yield the row of each head's chunk, of slabs in the order of a `SlabReader`."""
    for start in range(0, len(slabs), blocks):
        yield tagger.make(slabs[start : start + blocks])


def seal(draft: Draft, description: EntryDescription, tokens: Sequence[int], secret: bytes) -> None:
    """Complete an entry after all ranks have written their shares: header, token ids and digest.

    Raises:
        StoreError: a rank has not written its share into this draft.
    """
    layout = EntryLayout(description)
    ids = numpy.asarray(tokens, dtype="<i4").tobytes()
    tags = draft.read(layout.tags, layout.digest)
    rows = numpy.frombuffer(tags, numpy.uint8).reshape(-1, TAG_ROW_BYTES)
    if not rows.any(axis=1).all():
        raise StoreError("a rank's share of the draft is missing")
    draft.write_at(0, [layout.header, ids])
    draft.write_at(layout.digest, [entry_digest(description.canonical(), ids, tags, secret)])

"""Describe an entry: a file of whole KV blocks with the digests that protect them.

An entry is a safetensors file (https://github.com/huggingface/safetensors#format), which common tools can
read and which contains no code:

    8 bytes    length of the header, little-endian
    header     JSON: `__metadata__` with the `EntryDescription`, then the tensors
    tokens     I32 [tokens]: every token id of the context, in order
    layer.N    U8  [slabs, slab_bytes], in the order of the model's layers; by run, head and block
    tags       U8  [chunks, 32]: a nonce (12 bytes), a tag (16) and four zeros a chunk; by layer, run and head
    digest     U8  [32]: the digest of all the rest

A slab is the KV of one head in one block, its tokens in order. Heads are numbered as in the whole model, so
that an engine with any number of tensor-parallel ranks reads what an engine with any other has written. A
run is as many consecutive blocks of a layer as fit 1 MiB, at least one. A chunk is the slabs of one head in
one run. So the heads that a rank holds are read at once, and each is verified by itself.

A context that continues another one does not store that again: the entry names the entries that hold its
first blocks (`parts`), each with its digest, so that no other can take its place. The block in which both
meet is stored again, because it holds more tokens now. Layers with a sliding window keep the last tokens'
blocks only, all of which the entry itself holds. So each cache group has a first block of its own (`firsts`),
and a last one where they differ (`stops`). Layers with a running state keep one or two of them, each after
exactly so many tokens (`states`).

A context is its token ids and its images. All images have the same placeholder ids, so the description names
each image and its position.

A chunk's tag is AES-256-GMAC (NIST SP 800-38D) over its bytes, with a random nonce of its own, under a key
that BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) derives from the store's secret (`TAG_CONTEXT`):
three times as fast as a digest, and nobody without the secret can make one. `digest` is keyed BLAKE3 under
the secret itself. It covers the key, the fingerprint, the parts, the images, the token ids and all tags, so
each chunk has its place; it is verified when an entry is opened. So both corruption and forgery are
detected. Each chunk is verified before it is used.

Everything before `tags` has its place by the description alone, so several ranks write one file together.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy
from blake3 import blake3

from baton_kv.contract import TransferError, TransferFailure
from baton_kv.stores.base import MAX_SHARED, Reader, StoreError

FORMAT = "baton-kv/4"
OTHER_FORMAT = re.compile(r"baton-kv/\d{1,9}")
RUN_BYTES = 1024 * 1024
DIGEST_BYTES = 32
NONCE_BYTES, TAG_BYTES = 12, 16
TAG_ROW_BYTES = 32
TAG_CONTEXT = f"{FORMAT} 2026-11-28 tags of chunks"
PAGE_BYTES = 4096
LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 1024 * 1024
MAX_IDENTIFIER = 256
MAX_NAME = 64
MAX_LAYERS = 4096
MAX_NUMBER = 2**40
MAX_TOKENS = 2**24
MAX_CHUNKS = 2**21
"""Token ids and tags are read before they are verified, so a forged header must not ask for much."""
DIGEST = re.compile(r"[0-9a-f]{64}")
Tokens = numpy.ndarray[tuple[int], numpy.dtype[numpy.int32]]


class EntryInvalid(TransferError):
    """The bytes of an entry, or of its part with this index, are not valid; the message says why."""

    failure = TransferFailure.CORRUPT

    def __init__(self, reason: str, part: int | None = None) -> None:
        super().__init__(reason)
        self.part = part


class EntryIncompatible(EntryInvalid):
    """A valid entry of another model, layout or version, which cannot be used here."""

    failure = TransferFailure.INCOMPATIBLE


@dataclass(frozen=True)
class ImageRef:
    """One image of a context and the position of its placeholder tokens.

    Attributes:
        identifier: the engine's name for the image: the client's `uuid`, or a hash of the pixels.
        offset: index of the first placeholder.
        length: number of placeholders.
    """

    identifier: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Return the index of the first token after the image."""
        return self.offset + self.length


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer's KV, in the whole model.

    Attributes:
        heads: number of KV heads; 1 for a layer whose KV has no heads.
        slab_bytes: bytes of one head in one block.
        group: index of its cache group.
    """

    heads: int
    slab_bytes: int
    group: int = 0

    @cached_property
    def run_blocks(self) -> int:
        """Return the number of blocks in one run; the last run may hold fewer."""
        return max(1, RUN_BYTES // (self.heads * self.slab_bytes))


@dataclass(frozen=True)
class Part:
    """Blocks of a context that another entry holds.

    Attributes:
        key: key of that entry.
        digest: its digest, hexadecimal.
        stop: index, in the context, of the block after the last one that is taken from it. The first one is
            the `stop` of the part before, or 0.
    """

    key: str
    digest: str
    stop: int


@dataclass(frozen=True)
class EntryDescription:
    """The description in an entry's header, stored as JSON.

    Attributes:
        key: the key under which the entry was saved.
        fingerprint: fingerprint of the model and its KV, see `fingerprint.fingerprint`.
        tokens: number of token ids.
        computed: number of tokens, from the first, that have KV.
        layers: the shape of each layer, in the model's order.
        blocks: number of blocks of the context, in the groups that keep all of them.
        firsts: for each cache group, the index in the context of the first block that the entry itself holds.
        parts: the entries that hold its first blocks, in order, in groups without a window.
        images: the images of the context, in order.
        packing: name of the order of keys and values in a slab, see `joins.packing`; empty: it has no other
            name than the fingerprint's.
        format: name and version of the format.
        stops: for each cache group, the index of the block after the last one that the entry holds; empty
            where it is `blocks` for all, as it is where all blocks have as many tokens. It is then not
            written, as earlier versions of Baton do not know it.
        states: number of tokens, from the first, after which each of the running states is that the entry
            holds, ascending: block `n` of a group with states is the `n`th. Without any it is not written.
    """

    key: str
    fingerprint: str
    tokens: int
    computed: int
    layers: tuple[LayerShape, ...]
    blocks: int
    firsts: tuple[int, ...] = (0,)
    parts: tuple[Part, ...] = ()
    images: tuple[ImageRef, ...] = ()
    packing: str = ""
    format: str = FORMAT
    stops: tuple[int, ...] = ()
    states: tuple[int, ...] = ()

    def held(self, group: int) -> range:
        """Return the blocks of a group that this entry itself holds, by their indexes in the context."""
        return range(self.firsts[group], self.stops[group] if self.stops else self.blocks)

    def held_of(self, layer: int) -> range:
        """Return the blocks of a layer that this entry itself holds, by their indexes in the context."""
        return self.held(self.layers[layer].group)

    def first(self, layer: int) -> int:
        """Return the index, in the context, of the first block of a layer that this entry itself holds."""
        return self.held_of(layer).start

    def runs(self, layer: int) -> int:
        """Return the number of runs of a layer."""
        return -(-len(self.held_of(layer)) // self.layers[layer].run_blocks)

    def run(self, layer: int, index: int) -> range:
        """Return the blocks of one run, by their indexes in the context."""
        size, held = self.layers[layer].run_blocks, self.held_of(layer)
        return held[index * size : (index + 1) * size]

    @property
    def chunk_count(self) -> int:
        """Return the number of chunks of all heads of all layers."""
        return sum(shape.heads * self.runs(index) for index, shape in enumerate(self.layers))

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of KV that the entry itself holds."""
        return sum(
            shape.heads * shape.slab_bytes * len(self.held_of(index))
            for index, shape in enumerate(self.layers)
        )

    def canonical(self) -> str:
        """Return the description as JSON, the same text for the same description."""
        fields = asdict(self)
        for name in ("stops", "states"):
            if not fields[name]:
                del fields[name]
        return json.dumps(fields, sort_keys=True)


class EntryLayout:
    """The places of all that is in an entry's file; they follow from the description alone.

    Attributes:
        description: the entry's description.
        header: the first bytes of the file: length and header, padded so that KV begins on a page.
        tokens: offset of the token ids.
        tags: offset of the chunks' tags.
        digest: offset of the digest of all the rest.
        size: size of the file in bytes.
    """

    def __init__(self, description: EntryDescription) -> None:
        tensors = _tensors_of(description)
        header = {"__metadata__": {"baton_kv": description.canonical()}} | tensors
        text = json.dumps(header).encode()
        text += b" " * (-(LENGTH.size + len(text) + 4 * description.tokens) % PAGE_BYTES)
        self.header = LENGTH.pack(len(text)) + text
        self._place(description, tensors, len(self.header))

    @classmethod
    def read(cls, reader: Reader) -> tuple[EntryLayout, str]:
        """Return the layout of an entry's file, and its description as it is written there.

        Raises:
            EntryIncompatible: another version of this format wrote the file.
            ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error: it is no entry.
        """
        (length,) = LENGTH.unpack(reader.read(0, LENGTH.size))
        if not 0 < length <= min(MAX_HEADER_BYTES, len(reader) - LENGTH.size):
            raise ValueError("impossible length of the header")
        header = json.loads(reader.read(LENGTH.size, LENGTH.size + length))
        text = header.pop("__metadata__")["baton_kv"]
        if not text.isascii():  # as `canonical` writes it
            raise ValueError("the description is not ASCII")
        description = _description_of(text)
        tensors = _tensors_of(description)
        if header != tensors:
            raise ValueError("the tensors are not those described")
        layout = cls.__new__(cls)
        layout.header = b""
        layout._place(description, tensors, LENGTH.size + length)
        return layout, text

    def _place(self, description: EntryDescription, tensors: dict[str, Any], start: int) -> None:
        offsets: dict[str, int] = {
            name: start + tensor["data_offsets"][0] for name, tensor in tensors.items()
        }
        self.description = description
        self.tokens, self.tags, self.digest = (offsets[name] for name in ("tokens", "tags", "digest"))
        self.size = self.digest + DIGEST_BYTES
        self._layers = [offsets[f"layer.{index}"] for index in range(len(description.layers))]
        rows = (shape.heads * description.runs(index) for index, shape in enumerate(description.layers))
        self._rows = [0, *accumulate(rows)]

    def slab(self, layer: int, index: int, head: int, block: int) -> int:
        """Return the offset of a slab: block `block` of the context, which is in run `index` of the layer."""
        shape, run = self.description.layers[layer], self.description.run(layer, index)
        first = self.description.first(layer)
        before = (run.start - first) * shape.heads + head * len(run) + block - run.start
        return self._layers[layer] + before * shape.slab_bytes

    def tag(self, layer: int, index: int, head: int) -> int:
        """Return the offset of a chunk's tag."""
        row = self._rows[layer] + index * self.description.layers[layer].heads + head
        return self.tags + row * TAG_ROW_BYTES


def entry_digest(described: str, tokens: bytes, tags: bytes, secret: bytes) -> bytes:
    """Return the digest of a description, its token ids and its chunks' tags."""
    parts = (described.encode(), tokens, tags)
    digest = blake3(key=secret)
    for part in (b"".join(LENGTH.pack(len(part)) for part in parts), *parts):
        digest.update(part)
    return digest.digest()


def tag_key(secret: bytes) -> bytes:
    """Return the key of all tags in a store, which nothing else is made with."""
    return blake3(secret, derive_key_context=TAG_CONTEXT).digest()


def _tensors_of(description: EntryDescription) -> dict[str, Any]:
    """Return the tensors of the safetensors header, which follow from the description alone."""
    rows: list[tuple[str, str, list[int], int]] = [
        ("tokens", "I32", [description.tokens], 4 * description.tokens),
        *(
            (f"layer.{index}", "U8", shape, shape[0] * shape[1])
            for index, layer in enumerate(description.layers)
            for shape in ([layer.heads * len(description.held_of(index)), layer.slab_bytes],)
        ),
        ("tags", "U8", [description.chunk_count, TAG_ROW_BYTES], description.chunk_count * TAG_ROW_BYTES),
        ("digest", "U8", [DIGEST_BYTES], DIGEST_BYTES),
    ]
    tensors: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape, length in rows:
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + length]}
        offset += length
    return tensors


def _description_of(text: str) -> EntryDescription:
    """Return the description that a header holds as JSON."""
    fields = json.loads(text)
    if fields["format"] != FORMAT and OTHER_FORMAT.fullmatch(fields["format"]):
        raise EntryIncompatible("another version of the entry format")
    described = EntryDescription(
        **fields
        | {
            "images": tuple(ImageRef(**image) for image in fields["images"]),
            "firsts": tuple(fields["firsts"]),
            "stops": tuple(fields.get("stops", ())),
            "states": tuple(fields.get("states", ())),
            "parts": tuple(Part(**part) for part in fields["parts"]),
            "layers": tuple(LayerShape(**layer) for layer in fields["layers"]),
        }
    )
    _require_possible(described)
    return described


def _require_possible(described: EntryDescription) -> None:
    """Check the numbers that a header states, before anything is made of that size."""
    shapes = [number for layer in described.layers for number in (layer.heads, layer.slab_bytes)]
    stops, firsts = [part.stop for part in described.parts], described.firsts
    numbers = (described.tokens, described.blocks, described.computed, *shapes, *stops)
    if described.format != FORMAT or not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError("unknown format, or impossible sizes")
    if max(numbers) > MAX_NUMBER or not 0 < len(described.layers) <= MAX_LAYERS:
        raise ValueError("impossible sizes")
    if len(stops) > MAX_SHARED or not all(one < other for one, other in pairwise([*stops, described.blocks])):
        raise ValueError("impossible parts")
    if not all(type(part.key) is str and DIGEST.fullmatch(part.digest) for part in described.parts):
        raise ValueError("impossible parts")
    if not all(type(block) is int and 0 <= block <= MAX_NUMBER for block in (*firsts, *described.stops)):
        raise ValueError("impossible first or last blocks")
    if len(described.stops) not in (0, len(firsts)) or not all(map(described.held, range(len(firsts)))):
        raise ValueError("impossible first or last blocks")
    if not all(type(layer.group) is int and 0 <= layer.group < len(firsts) for layer in described.layers):
        raise ValueError("impossible cache groups")
    if not all(type(state) is int and 0 < state <= described.computed for state in described.states):
        raise ValueError("impossible running states")
    if not all(one < other for one, other in pairwise(described.states)):
        raise ValueError("impossible running states")
    if described.tokens > MAX_TOKENS or described.chunk_count > MAX_CHUNKS:
        raise ValueError("impossible number of tokens or chunks")
    if type(described.packing) is not str or len(described.packing) > MAX_NAME:
        raise ValueError("impossible packing")
    if described.computed > described.tokens:
        raise ValueError("impossible number of computed tokens")
    if not _in_order(described.images, described.tokens):
        raise ValueError("impossible images")


def _in_order(images: tuple[ImageRef, ...], tokens: int) -> bool:
    """Return whether the images are valid, in order and without overlap within this many tokens."""
    reached = 0
    for image in images:
        if type(image.identifier) is not str or not 0 < len(image.identifier) <= MAX_IDENTIFIER:
            return False
        if type(image.offset) is not int or type(image.length) is not int or image.length < 1:
            return False
        if not reached <= image.offset <= tokens - image.length:
            return False
        reached = image.end
    return True


def shared_keys(reader: Reader) -> tuple[str, ...]:
    """Return the keys of the entries whose files an entry needs beside its own, in order, without verifying.

    Raises:
        StoreError: the file is not an entry of this version.
    """
    try:
        layout, _ = EntryLayout.read(reader)
    except EntryIncompatible as error:
        raise StoreError(str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        raise StoreError("the entry's description cannot be read") from None
    return tuple(part.key for part in layout.description.parts)


def seal_of(reader: Reader) -> str:
    """Return the digest at the end of an entry's file, hexadecimal: no other entry has the same."""
    return reader.read(len(reader) - DIGEST_BYTES, len(reader)).hex()

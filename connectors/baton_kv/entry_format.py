"""Describe an entry: a file of whole KV blocks with the digests that protect them.

An entry is a safetensors file (https://github.com/huggingface/safetensors#format), which common tools can
read and which contains no code:

    8 bytes    length of the header, little-endian
    header     JSON: `__metadata__` with the `EntryDescription`, then the tensors
    tokens     I32 [tokens]: every token id of the context, in order
    layer.N    U8  [heads, blocks, slab_bytes], in the order of the model's layers
    digests    U8  [rows, 32]: one keyed BLAKE3 digest a chunk, by layer, head and position
    digest     U8  [32]: the digest of all the rest

A slab is the KV of one head in one block, its tokens in order. Heads are numbered as in the whole model, so
that an engine with any number of tensor-parallel ranks reads what an engine with any other has written. A
chunk is a run of slabs of one head of one layer.

A context is its token ids and its images. All images have the same placeholder ids, so the description names
each image and its position.

Digests are keyed BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) under the store's secret, so both
corruption and forgery are detected. `digest` covers the key, the fingerprint, the images, the token ids and
all chunk digests; it is verified when an entry is opened. Each chunk is verified before it is copied.

Everything before `digests` has its place by the description alone, so several ranks write one file together.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy
from blake3 import blake3

from baton_kv.contract import TransferError, TransferFailure
from baton_kv.stores.base import Buffer, Reader

FORMAT = "baton-kv/3"
OTHER_FORMAT = re.compile(r"baton-kv/\d{1,9}")
CHUNK_BYTES = 1024 * 1024
DIGEST_BYTES = 32
PAGE_BYTES = 4096
LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 1024 * 1024
MAX_IDENTIFIER = 256
MAX_LAYERS = 4096
MAX_NUMBER = 2**40
MAX_TOKENS = 2**24
MAX_CHUNKS = 2**21
"""Token ids and digests are read before they are verified, so a forged header must not ask for much."""
Tokens = numpy.ndarray[tuple[int], numpy.dtype[numpy.int32]]


class EntryInvalid(TransferError):
    """The bytes are not a valid entry; the message says why."""

    failure = TransferFailure.CORRUPT


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
    """

    heads: int
    slab_bytes: int

    @property
    def chunk_blocks(self) -> int:
        """Return the number of slabs in one chunk; the last chunk of a head may hold fewer."""
        return max(1, CHUNK_BYTES // self.slab_bytes)


@dataclass(frozen=True)
class EntryDescription:
    """The description in an entry's header, stored as JSON.

    Attributes:
        key: the key under which the entry was saved.
        fingerprint: fingerprint of the model and its KV, see `fingerprint.fingerprint`.
        tokens: number of token ids.
        computed: number of tokens, from the first, that have KV.
        layers: the shape of each layer, in the model's order.
        blocks: number of blocks a layer.
        images: the images of the context, in order.
        format: name and version of the format.
    """

    key: str
    fingerprint: str
    tokens: int
    computed: int
    layers: tuple[LayerShape, ...]
    blocks: int
    images: tuple[ImageRef, ...] = ()
    format: str = FORMAT

    def chunks(self, layer: int) -> int:
        """Return the number of chunks of one head of a layer."""
        return -(-self.blocks // self.layers[layer].chunk_blocks)

    def chunk(self, layer: int, index: int) -> slice:
        """Return the range of blocks of one chunk."""
        size = self.layers[layer].chunk_blocks
        return slice(index * size, min((index + 1) * size, self.blocks))

    @property
    def chunk_count(self) -> int:
        """Return the number of chunks of all heads of all layers."""
        return sum(shape.heads * self.chunks(index) for index, shape in enumerate(self.layers))

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of KV in the entry."""
        return sum(shape.heads * shape.slab_bytes for shape in self.layers) * self.blocks

    def canonical(self) -> str:
        """Return the description as JSON, the same text for the same description."""
        return json.dumps(asdict(self), sort_keys=True)


class EntryLayout:
    """Where everything is in an entry's file; it follows from the description alone.

    Args:
        description: the entry's description.

    Attributes:
        header: the first bytes of the file: length and header, padded so that KV begins on a page.
        tokens: offset of the token ids.
        digests: offset of the chunk digests.
        digest: offset of the digest of all the rest.
        size: size of the file in bytes.
    """

    def __init__(self, description: EntryDescription) -> None:
        self._described = description
        self._tensors = tensors_of(description)
        header = {"__metadata__": {"baton_kv": description.canonical()}} | self._tensors
        text = json.dumps(header).encode()
        text += b" " * (-(LENGTH.size + len(text) + 4 * description.tokens) % PAGE_BYTES)
        self.header = LENGTH.pack(len(text)) + text
        self._place(len(self.header))

    @classmethod
    def read(cls, description: EntryDescription, start: int) -> EntryLayout:
        """Return the layout of a file whose tensors begin at offset `start`."""
        layout = cls.__new__(cls)
        layout._described, layout._tensors, layout.header = description, tensors_of(description), b""
        layout._place(start)
        return layout

    def _place(self, start: int) -> None:
        offsets: dict[str, int] = {
            name: start + tensor["data_offsets"][0] for name, tensor in self._tensors.items()
        }
        self.tokens, self.digests, self.digest = (offsets[name] for name in ("tokens", "digests", "digest"))
        self.size = self.digest + DIGEST_BYTES
        self._layers = [offsets[f"layer.{index}"] for index in range(len(self._described.layers))]
        rows = (
            shape.heads * self._described.chunks(index) for index, shape in enumerate(self._described.layers)
        )
        self._rows = [0, *accumulate(rows)]

    def slab(self, layer: int, head: int, block: int) -> int:
        """Return the offset of a slab."""
        described = self._described
        return self._layers[layer] + (head * described.blocks + block) * described.layers[layer].slab_bytes

    def chunk_digest(self, layer: int, head: int, index: int) -> int:
        """Return the offset of a chunk's digest."""
        return (
            self.digests + (self._rows[layer] + head * self._described.chunks(layer) + index) * DIGEST_BYTES
        )


def tensors_of(description: EntryDescription) -> dict[str, Any]:
    """Return the tensors of the safetensors header, which follow from the description alone."""
    rows: list[tuple[str, str, list[int], int]] = [
        ("tokens", "I32", [description.tokens], 4 * description.tokens),
        *(
            (f"layer.{index}", "U8", shape, shape[0] * shape[1] * shape[2])
            for index, layer in enumerate(description.layers)
            for shape in ([layer.heads, description.blocks, layer.slab_bytes],)
        ),
        ("digests", "U8", [description.chunk_count, DIGEST_BYTES], description.chunk_count * DIGEST_BYTES),
        ("digest", "U8", [DIGEST_BYTES], DIGEST_BYTES),
    ]
    tensors: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape, length in rows:
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + length]}
        offset += length
    return tensors


def digest_of(secret: bytes, *parts: Buffer) -> bytes:
    """Return the BLAKE3 digest of these bytes, one part after the other, under the store's secret."""
    digest = blake3(key=secret)
    for part in parts:
        digest.update(part)
    return digest.digest()


def entry_digest(described: str, tokens: bytes, digests: bytes, secret: bytes) -> bytes:
    """Return the digest of a description, its token ids and its chunk digests."""
    parts = (described.encode(), tokens, digests)
    sizes = b"".join(LENGTH.pack(len(part)) for part in parts)
    return digest_of(secret, sizes, *parts)


def read_header(reader: Reader) -> tuple[EntryDescription, int]:
    """Return an entry's description and the offset of its first tensor.

    Raises:
        EntryIncompatible: another version of this format wrote the file.
        ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error: it is no entry.
    """
    (length,) = LENGTH.unpack(reader.read(0, LENGTH.size))
    if not 0 < length <= min(MAX_HEADER_BYTES, len(reader) - LENGTH.size):
        raise ValueError("impossible length of the header")
    header = json.loads(reader.read(LENGTH.size, LENGTH.size + length))
    metadata = header.pop("__metadata__")
    fields = json.loads(metadata["baton_kv"])
    if fields["format"] != FORMAT and OTHER_FORMAT.fullmatch(fields["format"]):
        raise EntryIncompatible("another version of the entry format")
    described = EntryDescription(
        **fields
        | {
            "images": tuple(ImageRef(**image) for image in fields["images"]),
            "layers": tuple(LayerShape(**layer) for layer in fields["layers"]),
        }
    )
    _require_possible(described)
    if header != tensors_of(described):
        raise ValueError("the tensors are not those described")
    return described, LENGTH.size + length


def _require_possible(described: EntryDescription) -> None:
    """Check the numbers that a header states, before anything is made of that size.

    Raises:
        ValueError: they cannot be those of an entry.
    """
    shapes = [number for layer in described.layers for number in (layer.heads, layer.slab_bytes)]
    numbers = (described.tokens, described.blocks, described.computed, *shapes)
    if described.format != FORMAT or not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError("unknown format, or impossible sizes")
    if max(numbers) > MAX_NUMBER or not 0 < len(described.layers) <= MAX_LAYERS:
        raise ValueError("impossible sizes")
    if described.tokens > MAX_TOKENS or described.chunk_count > MAX_CHUNKS:
        raise ValueError("impossible number of tokens or chunks")
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

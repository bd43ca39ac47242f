"""Write, open and verify entries: files of whole KV blocks with the digests that protect them.

An entry is a safetensors file (https://github.com/huggingface/safetensors#format), which common tools can
read and which contains no code:

    8 bytes    length of the header, little-endian
    header     JSON: `__metadata__` with the `EntryDescription` and its digest, then the tensors
    tokens     I32 [tokens]: every token id of the context, in order
    digests    U8  [layers, chunks, 32]: one keyed BLAKE3 digest a chunk
    layer.N    U8  [blocks, block_bytes], in the order of the engine's layers

A context is its token ids and its images. All images have the same placeholder ids, so the description names
each image and its position.

Digests are keyed BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) under the store's secret, so both
corruption and forgery are detected. The description's digest covers the key, the fingerprint, the images, the
token ids and all chunk digests; it is verified when an entry is opened. Each chunk is verified before it is
copied.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy
from blake3 import blake3

from baton_kv.contract import TransferError, TransferFailure
from baton_kv.stores.base import Reader

FORMAT = "baton-kv/2"
OTHER_FORMAT = re.compile(r"baton-kv/\d{1,9}")
CHUNK_BYTES = 1024 * 1024
DIGEST_BYTES = 32
PAGE_BYTES = 4096
LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 1024 * 1024
MAX_IDENTIFIER = 256
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
class EntryDescription:
    """The description in an entry's header, stored as JSON.

    Attributes:
        key: the key under which the entry was saved.
        fingerprint: fingerprint of the model and the KV layout, see `fingerprint.fingerprint`.
        tokens: number of token ids.
        computed: number of tokens, from the first, that have KV.
        layers: number of layers.
        blocks: number of blocks a layer.
        block_bytes: bytes of one block of one layer.
        images: the images of the context, in order.
        format: name and version of the format.
    """

    key: str
    fingerprint: str
    tokens: int
    computed: int
    layers: int
    blocks: int
    block_bytes: int
    images: tuple[ImageRef, ...] = ()
    format: str = FORMAT

    @property
    def chunk_blocks(self) -> int:
        """Return the number of blocks in one chunk; the last chunk of a layer may hold fewer."""
        return max(1, CHUNK_BYTES // self.block_bytes)

    @property
    def chunks(self) -> int:
        """Return the number of chunks a layer."""
        return -(-self.blocks // self.chunk_blocks)

    def chunk(self, index: int) -> slice:
        """Return the range of blocks of one chunk."""
        return slice(index * self.chunk_blocks, min((index + 1) * self.chunk_blocks, self.blocks))


def write(
    description: EntryDescription,
    tokens: Sequence[int],
    layer_blocks: Callable[[int], Sequence[memoryview]],
    secret: bytes,
) -> Iterator[bytes | memoryview]:
    """Yield the parts of an entry's file, in order.

    Args:
        description: the entry's description.
        tokens: every token id of the context.
        layer_blocks: returns the blocks of a layer, each `block_bytes` long; called twice a layer, and must
            return the same bytes.
        secret: the store's secret, 32 bytes.
    """
    ids = numpy.asarray(tokens, dtype="<i4")
    layers = range(description.layers)
    digests = b"".join(_chunk_digests(description, layer_blocks(layer), secret) for layer in layers)
    described = json.dumps(asdict(description), sort_keys=True)
    digest = _description_digest(described, ids.tobytes(), digests, secret)
    tensors = _tensors(description)
    header = json.dumps({"__metadata__": {"baton_kv": described, "digest": digest.hex()}} | tensors).encode()
    before = LENGTH.size + len(header) + ids.nbytes + len(digests)
    header += b" " * (-before % PAGE_BYTES)  # so that the blocks begin on a page
    yield LENGTH.pack(len(header)) + header
    yield ids.tobytes()
    yield digests
    for layer in layers:
        yield from layer_blocks(layer)


def _chunk_digests(description: EntryDescription, blocks: Sequence[memoryview], secret: bytes) -> bytes:
    slices = (description.chunk(index) for index in range(description.chunks))
    return b"".join(_digest(secret, *blocks[chunk]) for chunk in slices)


def _digest(secret: bytes, *parts: bytes | memoryview) -> bytes:
    digest = blake3(key=secret)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _description_digest(described: str, tokens: bytes, digests: bytes, secret: bytes) -> bytes:
    parts = (described.encode(), tokens, digests)
    sizes = b"".join(LENGTH.pack(len(part)) for part in parts)
    return _digest(secret, sizes, *parts)


def _tensors(description: EntryDescription) -> dict[str, Any]:
    """Return the tensors of the safetensors header, which follow from the description alone."""
    rows: list[tuple[str, str, list[int], int]] = [
        ("tokens", "I32", [description.tokens], 4 * description.tokens),
        (
            "digests",
            "U8",
            [description.layers, description.chunks, DIGEST_BYTES],
            description.layers * description.chunks * DIGEST_BYTES,
        ),
    ]
    size = description.blocks * description.block_bytes
    shape = [description.blocks, description.block_bytes]
    rows += [(f"layer.{index}", "U8", shape, size) for index in range(description.layers)]
    tensors: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape, length in rows:
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + length]}
        offset += length
    return tensors


class Entry:
    """An open entry whose description, token ids and chunk digests are verified; blocks are verified as read.

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
            self.description, self.digest, start = _read_header(reader)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise EntryInvalid(f"the header cannot be read ({type(error).__name__})") from None
        self._reader = reader
        self._secret = secret
        described = self.description
        tensors = _tensors(described)
        end = tensors[f"layer.{described.layers - 1}"]["data_offsets"][1]
        if len(reader) - start != end:
            raise EntryInvalid(
                f"the file has {len(reader) - start} bytes of tensors, the header announces {end}"
            )
        tokens, self._digests = (
            reader.read(*(start + offset for offset in tensors[name]["data_offsets"]))
            for name in ("tokens", "digests")
        )
        canonical = json.dumps(asdict(described), sort_keys=True)
        if _description_digest(canonical, tokens, self._digests, secret).hex() != self.digest:
            raise EntryInvalid("the description does not match its digest")
        if described.key != key:
            raise EntryInvalid("the entry was saved under another key")
        self.tokens: Tokens = numpy.frombuffer(tokens, dtype="<i4")
        self._layers = start + tensors["layer.0"]["data_offsets"][0]

    def require(self, fingerprint: str) -> None:
        """Refuse an entry of another model, layout or version.

        Raises:
            EntryIncompatible: the entry's fingerprint is not `fingerprint`.
        """
        if self.description.fingerprint != fingerprint:
            raise EntryIncompatible("the entry was saved with another model, layout or version")

    def chunk(self, layer: int, index: int, buffer: memoryview | None = None) -> memoryview:
        """Read and verify one chunk; return its bytes.

        Args:
            layer: index of the layer.
            index: index of the chunk in the layer.
            buffer: memory to read into, at least `chunk_blocks * block_bytes` long; None allocates it.

        Raises:
            EntryInvalid: the bytes do not match the chunk's digest.
        """
        described = self.description
        blocks = described.chunk(index)
        size = (blocks.stop - blocks.start) * described.block_bytes
        data = (memoryview(bytearray(size)) if buffer is None else buffer)[:size]
        self.read_blocks(layer, blocks.start, [data])
        at = (layer * described.chunks + index) * DIGEST_BYTES
        if _digest(self._secret, data) != self._digests[at : at + DIGEST_BYTES]:
            raise EntryInvalid(f"chunk {index} of layer {layer} does not match its digest")
        return data

    def read_blocks(self, layer: int, first: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with the bytes of a layer's blocks from `first` on, without verifying them.

        Raises:
            EntryInvalid: the file ends before the buffers are full.
        """
        described = self.description
        start = self._layers + (layer * described.blocks + first) * described.block_bytes
        if self._reader.read_into(start, buffers) != sum(map(len, buffers)):
            raise EntryInvalid(f"the file ends within layer {layer}")


def _read_header(reader: Reader) -> tuple[EntryDescription, str, int]:
    """Return an entry's description, its digest (hexadecimal), and the offset of its first tensor."""
    (length,) = LENGTH.unpack(reader.read(0, LENGTH.size))
    if not 0 < length <= min(MAX_HEADER_BYTES, len(reader) - LENGTH.size):
        raise ValueError("impossible length of the header")
    header = json.loads(reader.read(LENGTH.size, LENGTH.size + length))
    metadata = header.pop("__metadata__")
    fields = json.loads(metadata["baton_kv"])
    if fields["format"] != FORMAT and OTHER_FORMAT.fullmatch(fields["format"]):
        raise EntryIncompatible("another version of the entry format")
    described = EntryDescription(
        **fields | {"images": tuple(ImageRef(**image) for image in fields["images"])}
    )
    numbers = (described.tokens, described.layers, described.blocks, described.block_bytes)
    if described.format != FORMAT or not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError("unknown format, or impossible sizes")
    if type(described.computed) is not int or not 0 < described.computed <= described.tokens:
        raise ValueError("impossible number of computed tokens")
    if not _in_order(described.images, described.tokens):
        raise ValueError("impossible images")
    if max(numbers) > 2**40 or described.layers > 4096 or header != _tensors(described):
        raise ValueError("the tensors are not those described")
    return described, metadata["digest"], LENGTH.size + length


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

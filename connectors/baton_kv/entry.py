"""The format of an entry: whole KV blocks as opaque bytes, and everything needed to trust them.

A safetensors file (https://github.com/huggingface/safetensors#format), so that any tool can look
inside and nothing in it can run:

    8 bytes    length of the header, little-endian
    header     JSON: `__metadata__` with our description and its digest, then the tensors
    tokens     I32 [tokens]: every token id of the context, in order
    digests    U8  [layers, chunks, 32]: one keyed BLAKE3 a chunk
    layer.N    U8  [blocks, block_bytes], in the order of the engine's layers

A context is its token ids and the images they stand for: all images have the same ids, so the description
names each one and where it stands.

Digests are keyed BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) under the store's secret: a flipped
bit and a forged entry look the same. The description's digest covers the key, the fingerprint, the
images, the token ids and all chunk digests; it is checked when an entry is opened, each chunk before it is
copied.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
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
    """The bytes are not an entry that may be used, and why."""

    failure = TransferFailure.CORRUPT


class EntryForeign(EntryInvalid):
    """A sound entry, but of another model, layout or version: not to be used here."""

    failure = TransferFailure.INCOMPATIBLE


@dataclass(frozen=True)
class ImageSpan:
    """One image of a context, and the tokens that stand for it.

    Attributes:
        identifier: what tells it from every other image; the engine's name for it.
        offset: index of the first of its tokens.
        length: how many there are.
    """

    identifier: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Index of the first token after it."""
        return self.offset + self.length


@dataclass(frozen=True)
class Description:
    """What an entry says of itself.

    Attributes:
        key: the key it was saved under.
        fingerprint: of the model and the layout its bytes are in.
        tokens: how many token ids it holds.
        computed: for how many of them, from the first, it holds KV.
        layers: how many layers.
        blocks: blocks a layer.
        block_bytes: bytes of one block of one layer.
        images: the images its token ids stand for, in order.
        format: of this file.
    """

    key: str
    fingerprint: str
    tokens: int
    computed: int
    layers: int
    blocks: int
    block_bytes: int
    images: tuple[ImageSpan, ...] = ()
    format: str = FORMAT

    @property
    def chunk_blocks(self) -> int:
        """Blocks in one chunk; the last chunk of a layer may hold fewer."""
        return max(1, CHUNK_BYTES // self.block_bytes)

    @property
    def chunks(self) -> int:
        """Chunks a layer."""
        return -(-self.blocks // self.chunk_blocks)

    def chunk(self, index: int) -> slice:
        """The blocks of one chunk."""
        return slice(index * self.chunk_blocks, min((index + 1) * self.chunk_blocks, self.blocks))


def write(
    description: Description,
    tokens: Sequence[int],
    layer_blocks: Callable[[int], Sequence[memoryview]],
    secret: bytes,
) -> Iterator[bytes | memoryview]:
    """The parts of an entry's file, in order.

    Args:
        description: what it holds.
        tokens: every token id of the context.
        layer_blocks: gives a layer's blocks, each `block_bytes` long; asked twice, to the same answer.
        secret: 32 bytes, the store's.
    """
    ids = numpy.asarray(tokens, dtype="<i4")
    layers = range(description.layers)
    digests = b"".join(_chunk_digests(description, layer_blocks(layer), secret) for layer in layers)
    told = json.dumps(asdict(description), sort_keys=True)
    seal = _seal(told, ids.tobytes(), digests, secret)
    tensors = _tensors(description)
    header = json.dumps({"__metadata__": {"baton_kv": told, "digest": seal.hex()}} | tensors).encode()
    before = LENGTH.size + len(header) + ids.nbytes + len(digests)
    header += b" " * (-before % PAGE_BYTES)  # the blocks begin with a page
    yield LENGTH.pack(len(header)) + header
    yield ids.tobytes()
    yield digests
    for layer in layers:
        yield from layer_blocks(layer)


def _chunk_digests(description: Description, blocks: Sequence[memoryview], secret: bytes) -> bytes:
    slices = (description.chunk(index) for index in range(description.chunks))
    return b"".join(_digest(secret, *blocks[chunk]) for chunk in slices)


def _digest(secret: bytes, *parts: bytes | memoryview) -> bytes:
    digest = blake3(key=secret)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _seal(told: str, tokens: bytes, digests: bytes, secret: bytes) -> bytes:
    parts = (told.encode(), tokens, digests)
    sizes = b"".join(LENGTH.pack(len(part)) for part in parts)
    return _digest(secret, sizes, *parts)


def _tensors(description: Description) -> dict[str, Any]:
    """The tensors of safetensors' header: a pure function of the description, so it is compared whole."""
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
    """An entry whose description, token ids and chunk digests are proved; its blocks not yet.

    Args:
        reader: the file, open.
        key: the key it was opened by.
        secret: the store's.

    Raises:
        EntryInvalid: it is torn, changed, forged, or somebody else's.
        EntryForeign: another version of this file wrote it; what it holds is not looked at.
    """

    def __init__(self, reader: Reader, key: str, secret: bytes) -> None:
        try:
            self.description, self.seal, start = _read_header(reader)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise EntryInvalid(f"no readable header: {type(error).__name__}") from None
        self._reader = reader
        self._secret = secret
        described = self.description
        tensors = _tensors(described)
        end = tensors[f"layer.{described.layers - 1}"]["data_offsets"][1]
        if len(reader) - start != end:
            raise EntryInvalid(f"{len(reader) - start} bytes where {end} were announced")
        tokens, self._digests = (
            reader.read(*(start + offset for offset in tensors[name]["data_offsets"]))
            for name in ("tokens", "digests")
        )
        told = json.dumps(asdict(described), sort_keys=True)
        if _seal(told, tokens, self._digests, secret).hex() != self.seal:
            raise EntryInvalid("the description's digest is wrong")
        if described.key != key:
            raise EntryInvalid("it was saved under another key")
        self.tokens: Tokens = numpy.frombuffer(tokens, dtype="<i4")
        self._layers = start + tensors["layer.0"]["data_offsets"][0]

    def require(self, fingerprint: str) -> None:
        """Refuse an entry of another model, layout or version.

        Raises:
            EntryForeign: it is one.
        """
        if self.description.fingerprint != fingerprint:
            raise EntryForeign("it was saved by another model, layout or version")

    def chunk(self, layer: int, index: int, buffer: memoryview | None = None) -> memoryview:
        """The bytes of one chunk, proved.

        Args:
            layer: which layer.
            index: which of its chunks.
            buffer: where to put them, at least `chunk_blocks * block_bytes` long; None: memory of its own.

        Raises:
            EntryInvalid: they are not what was saved.
        """
        described = self.description
        blocks = described.chunk(index)
        size = (blocks.stop - blocks.start) * described.block_bytes
        data = (memoryview(bytearray(size)) if buffer is None else buffer)[:size]
        self.read_blocks(layer, blocks.start, [data])
        at = (layer * described.chunks + index) * DIGEST_BYTES
        if _digest(self._secret, data) != self._digests[at : at + DIGEST_BYTES]:
            raise EntryInvalid(f"layer {layer}, chunk {index}: the digest is wrong")
        return data

    def read_blocks(self, layer: int, first: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with the bytes of a layer's blocks from `first` on, as they are, unproved.

        Raises:
            EntryInvalid: they are not all there.
        """
        described = self.description
        start = self._layers + (layer * described.blocks + first) * described.block_bytes
        if self._reader.read_into(start, buffers) != sum(map(len, buffers)):
            raise EntryInvalid(f"layer {layer}: it ends too early")


def _read_header(reader: Reader) -> tuple[Description, str, int]:
    """What an entry says of itself, its digest, and where its tensors begin."""
    (length,) = LENGTH.unpack(reader.read(0, LENGTH.size))
    if not 0 < length <= min(MAX_HEADER_BYTES, len(reader) - LENGTH.size):
        raise ValueError("the header's length is impossible")
    header = json.loads(reader.read(LENGTH.size, LENGTH.size + length))
    metadata = header.pop("__metadata__")
    told = json.loads(metadata["baton_kv"])
    if told["format"] != FORMAT and OTHER_FORMAT.fullmatch(told["format"]):
        raise EntryForeign("it is in the format of another version")
    described = Description(**told | {"images": tuple(ImageSpan(**image) for image in told["images"])})
    numbers = (described.tokens, described.layers, described.blocks, described.block_bytes)
    if described.format != FORMAT or not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError("another format")
    if type(described.computed) is not int or not 0 < described.computed <= described.tokens:
        raise ValueError("an impossible count of tokens")
    if not _in_order(described.images, described.tokens):
        raise ValueError("impossible images")
    if max(numbers) > 2**40 or described.layers > 4096 or header != _tensors(described):
        raise ValueError("the tensors are not those described")
    return described, metadata["digest"], LENGTH.size + length


def _in_order(images: tuple[ImageSpan, ...], tokens: int) -> bool:
    """Whether images stand one after the other within so many tokens."""
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


def common_prefix(tokens: Tokens, prompt: Sequence[int]) -> int:
    """How many token ids, from the first, are the same in both."""
    length = min(len(tokens), len(prompt))
    different = numpy.flatnonzero(tokens[:length] != numpy.asarray(prompt[:length], dtype=numpy.int64))
    return int(different[0]) if len(different) else length


def same_images(ours: Sequence[ImageSpan], theirs: Sequence[ImageSpan], shared: int) -> int:
    """How much of a prefix of equal token ids stands for the same images too.

    Args:
        ours: the images of one context, in order.
        theirs: those of the other.
        shared: how many token ids, from the first, are the same in both.

    Returns:
        `shared`, or where the first image begins that only one of them has there; and never the middle of
        an image, of which a model may see either all or nothing.
    """
    for mine, other in zip_longest(ours, theirs):
        if mine is None or other is None or mine != other:
            return min([shared, *(image.offset for image in (mine, other) if image is not None)])
        if mine.offset < shared < mine.end:
            return mine.offset
    return shared

"""Find everything in an entry's file: its place follows from the description alone."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

from baton_kv.entry_format import (
    DIGEST_BYTES,
    FORMAT,
    LENGTH,
    MAX_HEADER_BYTES,
    OTHER_FORMAT,
    PAGE_BYTES,
    EntryDescription,
    EntryIncompatible,
    ImageRef,
    LayerShape,
    Part,
    require_possible,
)
from baton_kv.stores.base import Reader


class EntryLayout:
    """Where everything is in an entry's file; it follows from the description alone.

    Args:
        description: the entry's description.

    Attributes:
        description: the entry's description.
        header: the first bytes of the file: length and header, padded so that KV begins on a page.
        tokens: offset of the token ids.
        digests: offset of the chunk digests.
        digest: offset of the digest of all the rest.
        size: size of the file in bytes.
    """

    def __init__(self, description: EntryDescription) -> None:
        tensors = tensors_of(description)
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
        description = description_of(text)
        tensors = tensors_of(description)
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
        self.tokens, self.digests, self.digest = (offsets[name] for name in ("tokens", "digests", "digest"))
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

    def chunk_digest(self, layer: int, index: int, head: int) -> int:
        """Return the offset of a chunk's digest."""
        row = self._rows[layer] + index * self.description.layers[layer].heads + head
        return self.digests + row * DIGEST_BYTES


def tensors_of(description: EntryDescription) -> dict[str, Any]:
    """Return the tensors of the safetensors header, which follow from the description alone."""
    rows: list[tuple[str, str, list[int], int]] = [
        ("tokens", "I32", [description.tokens], 4 * description.tokens),
        *(
            (f"layer.{index}", "U8", shape, shape[0] * shape[1])
            for index, layer in enumerate(description.layers)
            for shape in ([layer.heads * (description.blocks - description.first(index)), layer.slab_bytes],)
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


def description_of(text: str) -> EntryDescription:
    """Return the description that a header holds as JSON.

    Raises:
        EntryIncompatible: another version of this format wrote it.
        ValueError, KeyError, TypeError, AttributeError, RecursionError: it is none.
    """
    fields = json.loads(text)
    if fields["format"] != FORMAT and OTHER_FORMAT.fullmatch(fields["format"]):
        raise EntryIncompatible("another version of the entry format")
    described = EntryDescription(
        **fields
        | {
            "images": tuple(ImageRef(**image) for image in fields["images"]),
            "firsts": tuple(fields["firsts"]),
            "parts": tuple(Part(**part) for part in fields["parts"]),
            "layers": tuple(LayerShape(**layer) for layer in fields["layers"]),
        }
    )
    require_possible(described)
    return described

"""An entry is what was saved, to the bit, or it is nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy
import pytest
import safetensors

from baton_kv.contract import new_key
from baton_kv.entry import Entry
from baton_kv.entry_format import (
    CHUNK_BYTES,
    EntryDescription,
    EntryIncompatible,
    EntryInvalid,
    EntryLayout,
    ImageRef,
    LayerShape,
)
from baton_kv.entry_writer import SlabReader, write
from baton_kv.prefix import common_prefix, trim_to_equal_images
from baton_kv.stores.base import BytesReader

SECRET = b"s" * 32
TOKENS = list(range(1000, 1300))
LAYERS, HEADS = 3, 2


def describe(slab_bytes: int = CHUNK_BYTES // 2 + 64, **changes: object) -> EntryDescription:
    """Three layers; with slabs of the default size, one is a chunk."""
    plain = EntryDescription(
        key=new_key("local"),
        fingerprint="f" * 64,
        tokens=len(TOKENS),
        computed=len(TOKENS) - 1,
        layers=(LayerShape(HEADS, slab_bytes),) * LAYERS,
        blocks=3,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # fields of it


def slabs_of(described: EntryDescription) -> SlabReader:
    random_bytes = numpy.random.default_rng(0)
    made = [
        random_bytes.integers(0, 256, (shape.heads, described.blocks, shape.slab_bytes), numpy.uint8)
        for shape in described.layers
    ]
    return lambda layer, head, blocks: [memoryview(slab) for slab in made[layer][head, blocks]]


def kv_of(described: EntryDescription, layer: int) -> bytes:
    everything = slice(0, described.blocks)
    heads = range(described.layers[layer].heads)
    return b"".join(b"".join(slabs_of(described)(layer, head, everything)) for head in heads)


def encode(described: EntryDescription, secret: bytes = SECRET) -> bytes:
    return b"".join(bytes(part) for part in write(described, TOKENS, slabs_of(described), secret))


def read_all(data: bytes, key: str, secret: bytes = SECRET) -> bytes:
    entry = Entry(BytesReader(data), key, secret)
    described = entry.description
    assert entry.tokens.tolist() == TOKENS
    parts = [
        entry.chunk(layer, head, index)
        for layer, shape in enumerate(described.layers)
        for head in range(shape.heads)
        for index in range(described.chunks(layer))
    ]
    return b"".join(bytes(part) for part in parts)


@pytest.mark.parametrize("slab_bytes", [1, 4096, CHUNK_BYTES // 2 + 64, CHUNK_BYTES + 1])
def test_an_entry_reads_back_to_the_bit(slab_bytes: int) -> None:
    described = describe(slab_bytes)
    expected = b"".join(kv_of(described, layer) for layer in range(LAYERS))
    assert read_all(encode(described), described.key) == expected


def test_safetensors_own_library_reads_it() -> None:
    described = describe(4096)
    tensors = dict(safetensors.deserialize(encode(described)))
    assert set(tensors) == {"tokens", "digests", "digest", "layer.0", "layer.1", "layer.2"}
    assert numpy.frombuffer(tensors["tokens"]["data"], "<i4").tolist() == TOKENS
    assert bytes(tensors["layer.1"]["data"]) == kv_of(described, 1)


def test_every_flipped_bit_is_noticed() -> None:
    described = describe(512)
    sound = encode(described)
    rng = random.Random(7)
    header = int.from_bytes(sound[:8], "little") + 8
    places = [*range(8 * header), *(rng.randrange(8 * header, 8 * len(sound)) for _ in range(4000))]
    for place in places:
        flipped = bytearray(sound)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(EntryInvalid):
            read_all(bytes(flipped), described.key)


def test_every_cut_is_noticed() -> None:
    described = describe(64)
    sound = encode(described)
    for length in range(0, len(sound), 7):
        with pytest.raises(EntryInvalid):
            Entry(BytesReader(sound[:length]), described.key, SECRET)
    with pytest.raises(EntryInvalid):
        Entry(BytesReader(sound + b"x"), described.key, SECRET)


def test_an_entry_under_another_key_is_refused() -> None:
    described = describe(64)
    with pytest.raises(EntryInvalid, match="another key"):
        Entry(BytesReader(encode(described)), new_key("local"), SECRET)


def test_an_entry_made_without_the_secret_is_refused() -> None:
    described = describe(64)
    with pytest.raises(EntryInvalid, match="digest"):
        Entry(BytesReader(encode(described, b"f" * 32)), described.key, SECRET)


def test_chunks_may_not_change_places() -> None:
    described = describe(CHUNK_BYTES)
    data = bytearray(encode(described))
    start = EntryLayout(described).slab(0, 0, 0)
    first, second = slice(start, start + CHUNK_BYTES), slice(start + CHUNK_BYTES, start + 2 * CHUNK_BYTES)
    data[first], data[second] = data[second], data[first]
    with pytest.raises(EntryInvalid, match="chunk 0 of head 0 of layer 0"):
        read_all(bytes(data), described.key)


def test_another_model_s_entry_is_foreign_but_sound() -> None:
    described = describe(64)
    entry = Entry(BytesReader(encode(described)), described.key, SECRET)
    entry.require("f" * 64)
    with pytest.raises(EntryIncompatible):
        entry.require("e" * 64)


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 64,
        b"\x80\x04\x95",
        (2**62).to_bytes(8, "little") + b"{}",
        b"\x02" + b"\x00" * 7 + b"{}",
    ],
)
def test_hostile_bytes_are_refused_before_anything_is_made_of_them(hostile: bytes) -> None:
    with pytest.raises(EntryInvalid):
        Entry(BytesReader(hostile), new_key("local"), SECRET)


@pytest.mark.parametrize(
    ("prompt", "shared"),
    [
        ([], 0),
        ([1], 1),
        ([1, 2, 3], 3),
        ([1, 2, 3, 4], 3),
        ([9, 2, 3], 0),
        ([1, 2, 9, 3], 2),
        ([2**40, 2], 0),
    ],
)
def test_the_common_prefix_is_counted_in_token_ids(prompt: list[int], shared: int) -> None:
    assert common_prefix(numpy.array([1, 2, 3], numpy.int32), prompt) == shared


BIRD, FISH = "b" * 64, "f" * 64
TWO = (ImageRef(BIRD, 3, 100), ImageRef(FISH, 150, 150))


def test_an_entry_knows_the_images_of_its_context() -> None:
    described = describe(64, images=TWO)
    entry = Entry(BytesReader(encode(described)), described.key, SECRET)
    assert entry.description.images == TWO


def test_an_image_put_in_another_s_place_is_noticed() -> None:
    described = describe(64, images=TWO)
    sound = encode(described)
    for before, after in ((BIRD, FISH), ('"offset\\": 3', '"offset\\": 4')):
        changed = sound.replace(before.encode(), after.encode())
        assert changed != sound
        with pytest.raises(EntryInvalid, match="digest"):
            Entry(BytesReader(changed), described.key, SECRET)


@pytest.mark.parametrize(
    "images",
    [
        (ImageRef(BIRD, -1, 5),),
        (ImageRef(BIRD, 0, 0),),
        (ImageRef(BIRD, 299, 2),),
        (ImageRef(BIRD, 2**70, 1),),
        (ImageRef("", 0, 5),),
        (ImageRef("x" * 257, 0, 5),),
        (ImageRef(BIRD, 5, 5), ImageRef(FISH, 9, 5)),
        (ImageRef(BIRD, 5, 5), ImageRef(FISH, 0, 5)),
        (ImageRef(7, 0, 5),),  # type: ignore[arg-type]  # whatever a file may say
        (ImageRef(BIRD, "0", 5),),  # type: ignore[arg-type]  # as above
    ],
)
def test_an_entry_with_impossible_images_is_refused(images: tuple[ImageRef, ...]) -> None:
    described = describe(64, images=images)
    with pytest.raises(EntryInvalid, match="header"):
        Entry(BytesReader(encode(described)), described.key, SECRET)


def test_an_entry_of_before_there_were_images_is_left_alone() -> None:
    described = describe(64, format="baton-kv/2")
    with pytest.raises(EntryIncompatible, match="another version"):
        Entry(BytesReader(encode(described)), described.key, SECRET)


@pytest.mark.parametrize(
    ("theirs", "shared", "same"),
    [
        (TWO, 300, 300),
        (TWO, 3, 3),
        (TWO, 103, 103),
        (TWO, 120, 120),
        ((), 300, 3),
        ((), 2, 2),
        (TWO[:1], 300, 150),
        ((*TWO, ImageRef(BIRD, 320, 5)), 310, 310),
        ((ImageRef(FISH, 3, 100), TWO[1]), 300, 3),
        ((TWO[0], ImageRef(BIRD, 150, 150)), 300, 150),
        ((ImageRef(BIRD, 4, 100), TWO[1]), 300, 3),
        ((ImageRef(BIRD, 1, 100), TWO[1]), 300, 1),
        ((ImageRef(BIRD, 3, 99), TWO[1]), 300, 3),
        ((TWO[1],), 300, 3),
        (TWO, 4, 3),
        (TWO, 102, 3),
        (TWO, 299, 150),
    ],
)
def test_equal_token_ids_count_up_to_the_first_image_that_differs_and_never_to_the_middle_of_one(
    theirs: tuple[ImageRef, ...], shared: int, same: int
) -> None:
    assert trim_to_equal_images(TWO, theirs, shared) == same
    assert trim_to_equal_images(theirs, TWO, shared) == same

"""An entry is what was saved, to the bit, or it is nothing."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import numpy
import pytest
import safetensors
from support.memory_store import BytesReader

from baton_kv.contract import new_key
from baton_kv.entry import Entry, SlabReader, Tags, write
from baton_kv.format import (
    NONCE_BYTES,
    RUN_BYTES,
    TAG_ROW_BYTES,
    EntryDescription,
    EntryIncompatible,
    EntryInvalid,
    EntryLayout,
    ImageRef,
    LayerShape,
    Part,
)
from baton_kv.plan import common_prefix, trim_to_equal_images

SECRET = b"s" * 32
TOKENS = list(range(1000, 1300))
LAYERS, HEADS = 3, 2


def describe(slab_bytes: int = RUN_BYTES // 4 + 64, **changes: object) -> EntryDescription:
    """Three layers; with slabs of the default size, a block is a run."""
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
    return lambda layer, heads, blocks: [
        memoryview(made[layer][head, block]) for head in heads for block in blocks
    ]


def kv_of(described: EntryDescription, layer: int) -> bytes:
    """Return a layer's slabs in the order of the file."""
    heads, slabs = range(described.layers[layer].heads), slabs_of(described)
    runs = [described.run(layer, index) for index in range(described.runs(layer))]
    return b"".join(bytes(slab) for run in runs for slab in slabs(layer, heads, run))


def encode(described: EntryDescription, secret: bytes = SECRET) -> bytes:
    pieces = write(described, TOKENS, slabs_of(described), secret)
    return b"".join(b"".join(each) if isinstance(each, list) else bytes(each) for each in pieces)


def read_all(data: bytes, key: str, secret: bytes = SECRET) -> bytes:
    entry = Entry(BytesReader(data), key, secret)
    described = entry.description
    assert entry.tokens.tolist() == TOKENS
    parts = [
        entry.run(layer, index)
        for layer in range(len(described.layers))
        for index in range(described.runs(layer))
    ]
    return b"".join(bytes(part) for part in parts)


@pytest.mark.parametrize("slab_bytes", [1, 4096, RUN_BYTES // 4 + 64, RUN_BYTES // 2 + 64, RUN_BYTES + 1])
def test_an_entry_reads_back_to_the_bit(slab_bytes: int) -> None:
    described = describe(slab_bytes)
    expected = b"".join(kv_of(described, layer) for layer in range(LAYERS))
    assert read_all(encode(described), described.key) == expected


def test_safetensors_own_library_reads_it() -> None:
    described = describe(4096)
    tensors = dict(safetensors.deserialize(encode(described)))
    assert set(tensors) == {"tokens", "tags", "digest", "layer.0", "layer.1", "layer.2"}
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


def test_a_rank_s_heads_are_one_piece_of_the_file_and_verified_each() -> None:
    described = describe(4096, layers=(LayerShape(8, 4096),) * LAYERS)
    data = bytearray(encode(described))
    entry = Entry(BytesReader(data), described.key, SECRET)
    slabs = slabs_of(described)
    heads, blocks = range(2, 5), range(described.blocks)
    assert bytes(entry.run(1, 0, heads)) == b"".join(bytes(slab) for slab in slabs(1, heads, blocks))
    data[EntryLayout(described).slab(1, 0, 6, 1)] ^= 1
    damaged = Entry(BytesReader(data), described.key, SECRET)
    assert damaged.run(1, 0, heads) == entry.run(1, 0, heads), "another rank's head is not read"
    with pytest.raises(EntryInvalid, match="run 0 of head 6 of layer 1"):
        damaged.run(1, 0, range(5, 8))


def test_chunks_may_not_change_places() -> None:
    size = RUN_BYTES // HEADS
    described = describe(size)
    data = bytearray(encode(described))
    start = EntryLayout(described).slab(0, 0, 0, 0)
    first, second = slice(start, start + size), slice(start + size, start + 2 * size)
    data[first], data[second] = data[second], data[first]
    with pytest.raises(EntryInvalid, match="run 0 of head 0 of layer 0"):
        read_all(bytes(data), described.key)


PARTS = (Part(new_key("local"), "a" * 64, 1), Part(new_key("local"), "b" * 64, 2))


def test_an_entry_that_continues_others_holds_only_what_comes_after_them() -> None:
    described = describe(512, parts=PARTS, firsts=(2,))
    entry = Entry(BytesReader(encode(described)), described.key, SECRET)
    assert entry.description.parts == PARTS
    assert (described.first(0), described.kv_bytes) == (2, LAYERS * HEADS * 512)
    assert bytes(entry.run(0, 0)) == kv_of(described, 0)
    assert len(encode(described)) < len(encode(describe(512)))


@pytest.mark.parametrize(
    "parts",
    [
        (Part("local/x", "a" * 64, 300),),
        (Part("local/x", "a" * 64, 0),),
        (Part("local/x", "a" * 64, -1),),
        (Part("local/x", "a" * 63, 1),),
        (Part("local/x", "A" * 64, 1),),
        (Part("local/x", "a" * 64, 2), Part("local/y", "a" * 64, 1)),
        (Part("local/x", "a" * 64, 1), Part("local/y", "a" * 64, 1)),
        (Part("local/x", "a" * 64, "1"),),  # type: ignore[arg-type]  # whatever a file may say
        (Part(7, "a" * 64, 1),),  # type: ignore[arg-type]  # as above
        (Part("local/x", 7, 1),),  # type: ignore[arg-type]  # as above
        tuple(Part("local/x", "a" * 64, stop) for stop in range(1, 200)),
    ],
)
def test_an_entry_with_impossible_parts_is_refused(parts: tuple[Part, ...]) -> None:
    described = describe(64, parts=PARTS[:1], blocks=300)
    sound = encode(described)
    header = EntryLayout(described).header
    changed = replace(described, parts=parts).canonical()
    header = header.replace(
        json.dumps(described.canonical())[1:-1].encode(), json.dumps(changed)[1:-1].encode()
    )
    header = (len(header) - 8).to_bytes(8, "little") + header[8:]
    with pytest.raises(EntryInvalid, match="header"):
        Entry(BytesReader(header + sound[len(EntryLayout(described).header) :]), described.key, SECRET)


def test_every_cache_group_begins_where_it_must() -> None:
    """Layers with a window hold the last blocks only."""
    layers = (LayerShape(HEADS, 512), LayerShape(HEADS, 512, 1), LayerShape(1, 64, 1))
    described = describe(layers=layers, firsts=(0, 2))
    entry = Entry(BytesReader(encode(described)), described.key, SECRET)
    assert described.kv_bytes == 3 * HEADS * 512 + HEADS * 512 + 64
    for layer in range(3):
        assert bytes(entry.run(layer, 0)) == kv_of(described, layer)


@pytest.mark.parametrize("firsts", [(), (-1,), (3,), ("0",), (0.0,), (None,)])
def test_an_entry_with_impossible_first_blocks_is_refused(firsts: tuple[object, ...]) -> None:
    described = describe(64)
    written = b'\\"firsts\\": ' + json.dumps(json.dumps(list(firsts)))[1:-1].encode()
    forged = encode(described).replace(b'\\"firsts\\": [0]', written)
    length = int.from_bytes(forged[:8], "little") + len(forged) - len(encode(described))
    with pytest.raises(EntryInvalid, match="header"):
        Entry(BytesReader(length.to_bytes(8, "little") + forged[8:]), described.key, SECRET)


def test_a_part_put_in_another_s_place_is_noticed() -> None:
    described = describe(512, parts=PARTS)
    sound = encode(described)
    for before, after in ((PARTS[0].key, PARTS[1].key), ("a" * 64, "c" * 64)):
        changed = sound.replace(before.encode(), after.encode())
        assert changed != sound
        with pytest.raises(EntryInvalid, match="digest"):
            Entry(BytesReader(changed), described.key, SECRET)


def test_a_description_that_no_writer_makes_is_refused() -> None:
    """Half of a surrogate pair cannot be encoded, and the scheduler reads descriptions."""
    described = describe(64, fingerprint="\ud800" * 10)
    layout = EntryLayout(described)
    text = json.dumps({"__metadata__": {"baton_kv": json.dumps(asdict(described), ensure_ascii=False)}})
    header = json.loads(layout.header[8:]) | json.loads(text)
    written = json.dumps(header).encode()
    data = len(written).to_bytes(8, "little") + written + encode(describe(64))[len(layout.header) :]
    with pytest.raises(EntryInvalid):
        Entry(BytesReader(data), described.key, SECRET)


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


@pytest.mark.parametrize("number", [2, 3])
def test_an_entry_of_an_earlier_version_is_left_alone(number: int) -> None:
    described = describe(64, format=f"baton-kv/{number}")
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


def test_every_chunk_has_a_nonce_of_its_own_and_a_tag_that_fits_it_alone() -> None:
    """Two chunks with one nonce would give the key of all tags away; the same KV saved twice is no exception."""
    described = describe(4096)
    layout, chunks = EntryLayout(described), described.chunk_count
    rows = [
        encode(described)[layout.tags + at * TAG_ROW_BYTES :][:TAG_ROW_BYTES]
        for _ in range(3)
        for at in range(chunks)
    ]
    assert len({row[:NONCE_BYTES] for row in rows}) == 3 * chunks
    tags, chunk = Tags(SECRET), memoryview(kv_of(described, 0))[: 3 * 4096]
    row = tags.make([chunk[:4096], chunk[4096:]])
    assert tags.fits(row, chunk)
    assert tags.make([chunk]) != row
    assert not Tags(b"t" * 32).fits(row, chunk)
    assert not tags.fits(row, chunk[:-1])
    assert not any(tags.fits(bytes([*row[:at], row[at] ^ 1, *row[at + 1 :]]), chunk) for at in range(28))

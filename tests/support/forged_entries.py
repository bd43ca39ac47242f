"""Entries with valid digests and wrong KV, as only someone with the store's secret could write them."""

from __future__ import annotations

from pathlib import Path

from baton_kv.entry import Entry, write
from baton_kv.folders import store_secret
from baton_kv.stores.file import FileStore


def put_wrong_block(root: Path, path: Path, place: int, taken: int) -> None:
    """Write an entry again with one wrong block in each layer, under its own key.

    Args:
        root: the store's folder.
        path: the entry's file.
        place: index of the block that is wrong then.
        taken: index of the block, in the same run, whose KV it gets.
    """
    store, secret = FileStore(root), store_secret(root)
    key = f"{path.parent.name}/{path.stem}"
    with store.open(key) as reader:
        entry = Entry(reader, key, secret)

        def slabs(layer: int, heads: range, blocks: range) -> list[memoryview]:
            runs = range(entry.description.runs(layer))
            index = next(each for each in runs if entry.description.run(layer, each) == blocks)
            size = entry.description.layers[layer].slab_bytes
            data = entry.run(layer, index, heads)
            found = [data[start : start + size] for start in range(0, len(data), size)]
            if place not in blocks:
                return found
            for head in range(len(heads)):
                first = head * len(blocks) - blocks.start
                found[first + place] = found[first + taken]
            return found

        pieces = [
            b"".join(piece) if isinstance(piece, list) else bytes(piece)
            for piece in write(entry.description, entry.tokens.tolist(), slabs, secret)
        ]
    store.put(key, pieces)

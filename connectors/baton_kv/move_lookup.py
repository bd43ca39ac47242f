"""Look up which tokens of which entries can be moved into a context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from baton_kv.contract import MovedPart, TransferError
from baton_kv.entry import Entry
from baton_kv.entry_format import EntryIncompatible, EntryInvalid, ImageRef
from baton_kv.moves import Gap, Joined, Move
from baton_kv.prefix import common_prefix
from baton_kv.stores.base import EntryMissing, Store


class MoveLookup:
    """Looks up what can be moved into a context.

    Args:
        store: the store of the entries.
        secret: the store's secret, 32 bytes.
        fingerprints: those that an entry may have.
        most: most tokens that may be computed between the moved ones of one context.
    """

    def __init__(self, store: Store, secret: bytes, fingerprints: Sequence[str], most: int) -> None:
        self._store = store
        self._secret = secret
        self._fingerprints = fingerprints
        self._most = most
        self._failures: list[tuple[str, TransferError]] = []

    def take_failures(self) -> list[tuple[str, TransferError]]:
        """Return the entries that could not be used since the last call, and why."""
        failures, self._failures = self._failures, []
        return failures

    def plan(
        self, parts: Sequence[MovedPart], prompt: Sequence[int], images: Sequence[ImageRef], begin: int
    ) -> Joined:
        """Return what is moved, up to the first part that cannot be.

        Entries that cannot be used are noted for `take_failures`; a corrupt one is quarantined.

        Args:
            parts: what the request names, in order.
            prompt: token ids of the whole context.
            images: the images in it, in order.
            begin: number of its tokens that are loaded where they were.
        """
        joined, opened = Joined(begin), dict[str, Entry]()
        for part in parts:
            gap = Gap(joined.stop, tuple(prompt[joined.stop : part.to]))
            computed = sum(len(each.tokens) for each in (*joined.gaps, gap))
            if part.to < joined.stop or computed > self._most or any(_within(images, gap.start, gap.stop)):
                break
            move = self._move(part, prompt, images, opened)
            if move is None:
                break
            joined = Joined(begin, (*joined.moves, move), (*joined.gaps, gap))
        return replace(joined, gaps=tuple(gap for gap in joined.gaps if gap.tokens))

    def _move(
        self, part: MovedPart, prompt: Sequence[int], images: Sequence[ImageRef], opened: dict[str, Entry]
    ) -> Move | None:
        """Return what of a part can be moved; None: nothing. Each entry is opened once."""
        try:
            entry = opened[part.key] = opened.get(part.key) or self._open(part.key)
        except TransferError as error:
            self._failures.append((part.key, error))
            return None
        # The prompt's last token is always computed: its logits give the first token of the answer.
        held = min(part.start + part.tokens, entry.description.computed)
        tokens = common_prefix(entry.tokens[part.start : held], prompt[part.to : len(prompt) - 1])
        move = Move(part.key, entry.digest, entry.description.fingerprint, part.start, tokens, part.to)
        theirs = _within(entry.description.images, part.start, part.start + tokens)
        moved = [replace(image, offset=image.offset - part.start + part.to) for image in theirs]
        whole = all(move.to <= image.offset and image.end <= move.stop for image in moved)
        return move if tokens > 0 and whole and moved == list(_within(images, move.to, move.stop)) else None

    def _open(self, key: str) -> Entry:
        """Return an entry that is there with all its parts.

        Raises:
            EntryInvalid: it is corrupt, or of another model.
            StoreError: it, or a part of it, is missing or cannot be read.
        """
        try:
            with self._store.open(key) as reader:
                entry = Entry(reader, key, self._secret)
            entry.require(*self._fingerprints)
        except EntryIncompatible:
            raise
        except EntryInvalid:
            self._store.quarantine(key)
            raise
        if not all(self._store.exists(key, index) for index in range(len(entry.description.parts))):
            raise EntryMissing("a file that the entry shares is missing")
        return entry


def _within(images: Sequence[ImageRef], start: int, stop: int) -> Iterator[ImageRef]:
    """Return the images that have a token in a range."""
    return (image for image in images if image.offset < stop and image.end > start)

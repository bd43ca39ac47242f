"""Plan what a request loads: which entries hold KV of its prompt, and how much of each it can use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy

from baton_kv.blocks import CacheGroup
from baton_kv.contract import (
    MovedPart,
    Transfer,
    TransferError,
    TransferOutcome,
    TransferParams,
    failure_of,
)
from baton_kv.entry import Entry
from baton_kv.fingerprint import moved_fingerprint
from baton_kv.format import EntryDescription, EntryIncompatible, EntryInvalid, ImageRef, Part, Tokens
from baton_kv.messages import Gap, Joined, Move
from baton_kv.stores.base import EntryMissing, Store


@dataclass
class Plan:
    """The loads of one request.

    Attributes:
        matched: number of tokens, from the first, whose KV is loaded unless the engine has it.
        shared: number of tokens, from the first, that the prompt shares with the entry and that have KV.
        parts: the entries that hold this KV, in order; the last is the entry that the request names.
        tag: `TransferParams.tag` of the request.
        fingerprint: the fingerprint of the entry that the request names.
        joined: what is moved from other entries, the end of `matched`; None: nothing.
        state: index of the running state that the entry holds after `matched` tokens; None: it holds none.
    """

    matched: int
    shared: int
    parts: tuple[Part, ...]
    tag: str | None
    fingerprint: str = ""
    joined: Joined | None = None
    state: int | None = None

    @property
    def in_place(self) -> int:
        """Return the number of tokens, from the first, whose KV is loaded to the place that it had."""
        return self.joined.begin if self.joined is not None else self.matched


class LoadPlanner:
    """Plans the loads of one engine; corrupt entries that it meets are quarantined.

    Args:
        secret: the store's secret, 32 bytes.
        block_size: tokens in a block of the groups that keep all blocks.
        fingerprint: fingerprint of the engine's model and its KV.
        most_computed: most tokens that one join may compute between moved ones.
    """

    def __init__(
        self,
        store: Store,
        secret: bytes,
        outcomes: list[TransferOutcome],
        block_size: int,
        groups: tuple[CacheGroup, ...],
        *,
        fingerprint: str,
        most_computed: int,
    ) -> None:
        self._store = store
        self._secret = secret
        self._fingerprint = fingerprint
        self._moved = moved_fingerprint(fingerprint)
        self._block_size = block_size
        self._groups = groups
        self._most_computed = most_computed
        self._outcomes = outcomes

    def plan(
        self,
        request_id: str,
        key: str,
        wanted: TransferParams,
        prompt: Sequence[int],
        images: Sequence[ImageRef],
        *,
        apart: bool,
    ) -> Plan | None:
        """Plan the load of a request from the entry `key`; None: nothing can be used. Never raises.

        Args:
            prompt: token ids of the prompt.
            images: the images in the prompt, in order.
            apart: whether the request shares its KV with no other one, so that it may use moved KV.
        """
        try:
            entry = self._open(key, self._fingerprint, *([self._moved] if apart else []))
        except TransferError as error:
            self._note(request_id, key, wanted, error)
            return None
        described = entry.description
        shared = min(common_prefix(entry.tokens, prompt), self._stored_tokens(key, described))
        shared = trim_to_equal_images(described.images, images, shared)
        if shared < 1:
            return None
        # The prompt's last token is always computed: its logits give the first token of the answer.
        most = len(prompt) - 1 if wanted.limit is None else min(wanted.limit, len(prompt) - 1)
        matched = trim_to_equal_images(described.images, images, min(shared, most))
        matched = self._resumable(described, matched)
        if trim_to_equal_images(described.images, images, matched) < matched:
            matched = 0
        parts = (*described.parts, Part(key, entry.digest, described.blocks))
        state = described.states.index(matched) if matched in described.states else None
        plan = Plan(matched, shared, parts, wanted.tag, described.fingerprint, state=state)
        if not wanted.moved or matched < 1 or state is not None:
            return plan
        joined = self._join(wanted, prompt, images, min(matched, wanted.moved[0].to))
        if not joined.moves:
            return plan
        return replace(plan, matched=joined.stop, shared=min(shared, joined.begin), joined=joined)

    def _note(self, request_id: str, key: str, wanted: TransferParams, error: TransferError) -> None:
        """Note an entry that cannot be used."""
        failure = failure_of(error)
        self._outcomes.append(TransferOutcome(request_id, key, Transfer.LOOK, wanted.tag, failure))

    def _open(self, key: str, *fingerprints: str) -> Entry:
        """Open an entry that has one of these fingerprints, and read its token ids.

        Raises:
            EntryInvalid: it is corrupt, or of another model.
            StoreError: it is missing or cannot be read.
        """
        try:
            with self._store.open(key) as reader:
                entry = Entry(reader, key, self._secret)
            entry.require(*fingerprints)
        except EntryIncompatible:
            raise
        except EntryInvalid:
            self._store.quarantine(key)
            raise
        return entry

    def _resumable(self, described: EntryDescription, tokens: int) -> int:
        """Return the largest number of tokens, up to `tokens`, after which an entry lets a request go on.

        A running state is of use after exactly the tokens that it has seen.
        """
        found = described.states if any(group.state for group in self._groups) else (tokens,)
        usable = (each for each in found if each <= tokens and self._windows_held(described, each))
        return max(usable, default=0)

    def _windows_held(self, described: EntryDescription, tokens: int) -> bool:
        """Return whether an entry holds what windowed layers need to continue after this many tokens."""
        return all(
            group.window is None or first <= group.first_block(tokens)
            for group, first in zip(self._groups, described.firsts, strict=False)
        )

    def _stored_tokens(self, key: str, described: EntryDescription) -> int:
        """Return the number of tokens, from the first, whose KV is there: up to the first missing part."""
        reached = 0
        for index, part in enumerate(described.parts):
            if not self._store.exists(key, index):
                return reached * self._block_size
            reached = part.stop
        return described.computed

    def _join(
        self, wanted: TransferParams, prompt: Sequence[int], images: Sequence[ImageRef], begin: int
    ) -> Joined:
        """Plan the moves of a request, up to the first one that is not possible.

        Args:
            prompt: token ids of the whole context.
            images: the images in it, in order.
            begin: number of its tokens that are loaded where they were.
        """
        joined, opened = Joined(begin), dict[str, Entry]()
        for part in wanted.moved:
            gap = Gap(joined.stop, tuple(prompt[joined.stop : part.to]))
            computed = sum(len(each.tokens) for each in (*joined.gaps, gap))
            if part.to < joined.stop or computed > self._most_computed:
                break
            if any(_within(images, gap.start, gap.stop)):
                break
            try:
                entry = opened[part.key] = opened.get(part.key) or self._open_whole(part.key)
            except TransferError as error:
                self._note("", part.key, wanted, error)
                break
            if (move := _move_of(entry, part, prompt, images)) is None:
                break
            joined = Joined(begin, (*joined.moves, move), (*joined.gaps, gap))
        return replace(joined, gaps=tuple(gap for gap in joined.gaps if gap.tokens))

    def _open_whole(self, key: str) -> Entry:
        """Open an entry that is there with all its parts; exceptions as for `_open`."""
        entry = self._open(key, self._fingerprint, self._moved)
        if not all(self._store.exists(key, index) for index in range(len(entry.description.parts))):
            raise EntryMissing("a file that the entry shares is missing")
        return entry


def _move_of(entry: Entry, part: MovedPart, prompt: Sequence[int], images: Sequence[ImageRef]) -> Move | None:
    """Compute the move of a part of an entry: of the tokens that the prompt shares; None: it has none."""
    held = min(part.start + part.tokens, entry.description.computed)
    # The prompt's last token is always computed: its logits give the first token of the answer.
    tokens = common_prefix(entry.tokens[part.start : held], prompt[part.to : len(prompt) - 1])
    move = Move(part.key, entry.digest, entry.description.fingerprint, part.start, tokens, part.to)
    theirs = _within(entry.description.images, part.start, part.start + tokens)
    moved = [replace(image, offset=image.offset - part.start + part.to) for image in theirs]
    whole = all(move.to <= image.offset and image.end <= move.stop for image in moved)
    return move if tokens > 0 and whole and moved == list(_within(images, move.to, move.stop)) else None


def _within(images: Sequence[ImageRef], start: int, stop: int) -> Iterator[ImageRef]:
    """Return the images that have a token in a range."""
    return (image for image in images if image.offset < stop and image.end > start)


def common_prefix(tokens: Tokens, prompt: Sequence[int]) -> int:
    """Return the length of the longest common prefix of an entry's token ids and a prompt's."""
    length = min(len(tokens), len(prompt))
    different = numpy.flatnonzero(tokens[:length] != numpy.asarray(prompt[:length], dtype=numpy.int64))
    return int(different[0]) if len(different) else length


def trim_to_equal_images(ours: Sequence[ImageRef], theirs: Sequence[ImageRef], shared: int) -> int:
    """Shorten a common prefix of `shared` token ids so that it also contains the same images.

    It ends before the first image that differs, and never within an image, of which a model must see either
    all tokens or none. The images of both contexts are given in order.
    """
    for mine, other in zip_longest(ours, theirs):
        if mine is None or other is None or mine != other:
            return min([shared, *(image.offset for image in (mine, other) if image is not None)])
        if mine.offset < shared < mine.end:
            return mine.offset
    return shared

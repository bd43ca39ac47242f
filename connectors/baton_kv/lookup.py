"""Look an entry up for a prompt: how many of its tokens can be used, and which entries hold their KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton_kv.cache_groups import CacheGroup
from baton_kv.contract import TransferParams
from baton_kv.entry import Entry
from baton_kv.entry_format import EntryDescription, ImageRef, Part
from baton_kv.fingerprint import moved_fingerprint
from baton_kv.moves import Joined
from baton_kv.prefix import common_prefix, trim_to_equal_images
from baton_kv.stores.base import Store


@dataclass
class Plan:
    """What one request loads.

    Attributes:
        matched: number of tokens, from the first, whose KV is loaded unless the engine has it.
        shared: number of tokens, from the first, that the prompt shares with the entry and that have KV.
        parts: the entries that hold this KV, in order; the last is the entry that the request names.
        tag: `TransferParams.tag` of the request.
        fingerprint: the fingerprint of the entry that the request names.
        joined: what is moved from other entries, the end of `matched`; None: nothing.
    """

    matched: int
    shared: int
    parts: tuple[Part, ...]
    tag: str | None
    fingerprint: str = ""
    joined: Joined | None = None

    @property
    def in_place(self) -> int:
        """Return the number of tokens, from the first, whose KV is loaded to the place that it had."""
        return self.joined.begin if self.joined is not None else self.matched


class EntryLookup:
    """Looks entries up for one engine.

    Args:
        store: the store of the entries.
        secret: the store's secret, 32 bytes.
        fingerprint: fingerprint of the engine's model and its KV.
        block_size: tokens in a block.
        groups: the model's cache groups.
    """

    def __init__(
        self,
        store: Store,
        secret: bytes,
        fingerprint: str,
        block_size: int,
        groups: tuple[CacheGroup, ...],
    ) -> None:
        self._store = store
        self._secret = secret
        self._fingerprint = fingerprint
        self._moved = moved_fingerprint(fingerprint)
        self._block_size = block_size
        self._groups = groups

    def plan(
        self,
        key: str,
        wanted: TransferParams,
        prompt: Sequence[int],
        images: Sequence[ImageRef],
        *,
        apart: bool = False,
    ) -> Plan | None:
        """Return what of an entry a request can use; None: nothing.

        Args:
            key: key of the entry.
            wanted: the request's transfer parameters.
            prompt: token ids of the prompt.
            images: the images in the prompt, in order.
            apart: whether the request shares its KV with no other one, so that it may use moved KV.

        Raises:
            EntryInvalid: the entry is corrupt, or of another model.
            StoreError: the entry is missing, or cannot be read.
        """
        with self._store.open(key) as reader:
            entry = Entry(reader, key, self._secret)
        described = entry.description
        entry.require(self._fingerprint, *([self._moved] if apart else []))
        stored = self._stored_tokens(key, described)
        shared = min(common_prefix(entry.tokens, prompt), stored)
        shared = trim_to_equal_images(described.images, images, shared)
        # The prompt's last token is always computed: its logits give the first token of the answer.
        most = len(prompt) - 1 if wanted.limit is None else min(wanted.limit, len(prompt) - 1)
        matched = trim_to_equal_images(described.images, images, min(shared, most))
        if not self._windows_held(described, matched):
            matched = 0
        parts = (*described.parts, Part(key, entry.digest, described.blocks))
        plan = Plan(matched, shared, parts, wanted.tag, described.fingerprint)
        return plan if shared > 0 else None

    def _windows_held(self, described: EntryDescription, tokens: int) -> bool:
        """Return whether an entry holds what windowed layers need to continue after this many tokens."""
        return all(
            group.window is None or first <= group.first_block(tokens, self._block_size)
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

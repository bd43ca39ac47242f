"""Plan what a request loads, from its transfer parameters. Nothing here raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton_kv.cache_groups import CacheGroup
from baton_kv.contract import (
    Malformed,
    Transfer,
    TransferFailure,
    TransferOutcome,
    TransferParams,
    failure_of,
    parse,
)
from baton_kv.entry_format import EntryIncompatible, EntryInvalid, ImageRef
from baton_kv.fingerprint import moved_fingerprint
from baton_kv.lookup import EntryLookup, Plan
from baton_kv.move_lookup import MoveLookup
from baton_kv.stores.base import Store, StoreError


class LoadPlanner:
    """Plans the loads of one engine.

    Args:
        store: the store of the entries.
        secret: the store's secret, 32 bytes.
        fingerprint: fingerprint of the engine's model and its KV.
        block_size: tokens in a block.
        groups: the model's cache groups.
        most_computed: most tokens that one join may compute between moved ones.
    """

    def __init__(
        self,
        store: Store,
        secret: bytes,
        fingerprint: str,
        block_size: int,
        groups: tuple[CacheGroup, ...],
        most_computed: int,
    ) -> None:
        self._store = store
        self._lookup = EntryLookup(store, secret, fingerprint, block_size, groups)
        fingerprints = (fingerprint, moved_fingerprint(fingerprint))
        self._moves = MoveLookup(store, secret, fingerprints, most_computed)
        self._outcomes: list[TransferOutcome] = []

    def take_outcomes(self) -> list[TransferOutcome]:
        """Return the looks that failed since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def plan(
        self,
        request_id: str,
        params: object,
        prompt: Sequence[int],
        images: Sequence[ImageRef],
        salt: str | None,
    ) -> Plan | None:
        """Return what a request loads; None: nothing.

        Args:
            request_id: the engine's id of the request.
            params: the request's `kv_transfer_params`, not yet validated.
            prompt: token ids of the prompt.
            images: the images in the prompt, in order.
            salt: the request's `cache_salt`.
        """
        wanted = parse(params)
        tag = wanted.tag if isinstance(wanted, TransferParams) else None
        if isinstance(wanted, TransferParams) and wanted.moved and not wanted.is_apart(salt):
            wanted = Malformed("moved: the request needs a `cache_salt` that ends with `apart`")
        if isinstance(wanted, Malformed):
            self._outcomes.append(
                TransferOutcome(request_id, "", Transfer.LOOK, tag, TransferFailure.MALFORMED)
            )
            return None
        if wanted is None or wanted.load is None:
            return None
        try:
            plan = self._lookup.plan(wanted.load, wanted, prompt, images, apart=wanted.is_apart(salt))
            return self._with_moves(plan, wanted, prompt, images) if plan is not None else None
        except (EntryInvalid, StoreError) as error:
            if isinstance(error, EntryInvalid) and not isinstance(error, EntryIncompatible):
                self._store.quarantine(wanted.load)
            self._outcomes.append(
                TransferOutcome(request_id, wanted.load, Transfer.LOOK, wanted.tag, failure_of(error))
            )
            return None

    def _with_moves(
        self, plan: Plan, wanted: TransferParams, prompt: Sequence[int], images: Sequence[ImageRef]
    ) -> Plan:
        """Add what a request moves from other entries to what it loads from the first one."""
        if not wanted.moved or plan.matched < 1:
            return plan
        begin = min(plan.matched, wanted.moved[0].to)
        joined = self._moves.plan(wanted.moved, prompt, images, begin)
        self._outcomes += [
            TransferOutcome("", key, Transfer.LOOK, wanted.tag, failure_of(error))
            for key, error in self._moves.take_failures()
        ]
        if not joined.moves:
            return plan
        return replace(plan, matched=joined.stop, shared=min(plan.shared, begin), joined=joined)

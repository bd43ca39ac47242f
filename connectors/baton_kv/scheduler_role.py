"""The scheduler's half: which request starts from which entry, and whose blocks are saved.

It sees token ids, images' names and block ids, never a tensor. Nothing here raises: whatever is wrong with an
entry or a message, the request is computed as if there were none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton_kv.contract import (
    Malformed,
    Transfer,
    TransferFailure,
    TransferOutcome,
    TransferParams,
    failure_of,
    params_to_load,
    parse,
)
from baton_kv.entry import Entry, EntryForeign, EntryInvalid, ImageSpan, common_prefix, same_images
from baton_kv.messages import LoadJob, SaveJob, StepJobs
from baton_kv.stores.base import Store, StoreError

MIN_TAIL_TOKENS = 16
"""Where the engine holds the blocks before them, fewer tokens than these are computed sooner than loaded."""
KEYS_REMEMBERED = 1024


@dataclass
class Plan:
    """What one request gets from an entry.

    Attributes:
        key: the entry.
        matched: how many tokens, from the first, its KV covers and the prompt shares.
        seal: the entry's digest.
        tag: what the request's asker calls it.
    """

    key: str
    matched: int
    seal: str
    tag: str | None


class SchedulerRole:
    """State of the scheduler's half.

    Args:
        store: where entries are.
        secret: of the store's digests.
        fingerprint: of this engine's model and layout.
        block_size: tokens in a block.
    """

    def __init__(self, store: Store, secret: bytes, fingerprint: str, block_size: int) -> None:
        self._store = store
        self._secret = secret
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._plans: dict[str, Plan | None] = {}
        self._jobs = StepJobs()
        self._loading: set[str] = set()
        self._saved: OrderedDict[str, None] = OrderedDict()
        self._told: list[TransferOutcome] = []

    def matched(
        self,
        request_id: str,
        params: object,
        prompt: Sequence[int],
        computed: int,
        images: Sequence[ImageSpan] = (),
    ) -> int:
        """How many tokens beyond `computed` an entry can bring. Asked at every attempt to schedule: cheap.

        Args:
            request_id: the request.
            params: its `kv_transfer_params`, as they came from outside.
            prompt: its prompt's token ids.
            computed: tokens the engine already has, whole blocks.
            images: the images its prompt's token ids stand for, in order.
        """
        if request_id not in self._plans:
            self._plans[request_id] = self._plan(request_id, params, prompt, images)
        plan = self._plans[request_id]
        brings = plan.matched - computed if plan is not None else 0
        return 0 if brings < 1 or (computed and brings < MIN_TAIL_TOKENS) else brings

    def _plan(
        self, request_id: str, params: object, prompt: Sequence[int], images: Sequence[ImageSpan]
    ) -> Plan | None:
        wanted = parse(params)
        if isinstance(wanted, Malformed):
            self._told.append(
                TransferOutcome(request_id, "", Transfer.LOOK, failure=TransferFailure.MALFORMED)
            )
            return None
        if wanted is None or wanted.load is None:
            return None
        try:
            return self._plan_with(wanted.load, wanted, prompt, images)
        except (EntryInvalid, StoreError) as error:
            if isinstance(error, EntryInvalid) and not isinstance(error, EntryForeign):
                self._store.quarantine(wanted.load)
            self._told.append(
                TransferOutcome(request_id, wanted.load, Transfer.LOOK, wanted.tag, failure_of(error))
            )
            return None

    def _plan_with(
        self, key: str, wanted: TransferParams, prompt: Sequence[int], images: Sequence[ImageSpan]
    ) -> Plan | None:
        with self._store.open(key) as reader:
            entry = Entry(reader, key, self._secret)
            entry.require(self._fingerprint)
            # The last token of the prompt is always computed here: its logits are the first answer.
            shared = common_prefix(entry.tokens, prompt)
            matched = min(shared, entry.description.computed, len(prompt) - 1)
        if wanted.limit is not None:
            matched = min(matched, wanted.limit)
        matched = same_images(entry.description.images, images, matched)
        return Plan(key, matched, entry.seal, wanted.tag) if matched > 0 else None

    def told(self) -> list[TransferOutcome]:
        """What this half has to tell since the last time: entries it cannot use, saves it does not begin."""
        told, self._told = self._told, []
        return told

    def allocated(self, request_id: str, block_ids: Sequence[int], external: int) -> None:
        """The engine gave blocks to a request; `external` of its tokens are to be loaded into them."""
        plan = self._plans.get(request_id)
        if external <= 0 or plan is None:
            return
        first = (plan.matched - external) // self._block_size
        last = -(-plan.matched // self._block_size)
        ids = tuple(block_ids[first:last])
        self._loading.add(request_id)
        self._jobs.loads.append(LoadJob(request_id, plan.key, first, ids, external, plan.seal, plan.tag))

    def step(self) -> StepJobs:
        """The jobs of this step; the next one starts without any."""
        jobs, self._jobs = self._jobs, StepJobs()
        return jobs

    def finished(
        self,
        request_id: str,
        params: object,
        *,
        tokens: Sequence[int],
        prompt: int,
        computed: int,
        block_ids: Sequence[int],
        whole: bool,
        images: Sequence[ImageSpan] = (),
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: save it, if it asked for that.

        Args:
            request_id: the request.
            params: its `kv_transfer_params`.
            tokens: every token id of its context, generated ones too.
            prompt: how many of them are its prompt.
            computed: tokens the engine has KV for.
            block_ids: its blocks.
            whole: it came to its own end, and holds nothing that token ids and images do not tell.
            images: the images its prompt's token ids stand for, in order.

        Returns:
            Whether its blocks must be held until the save is reported, and what its answer carries.
        """
        self._plans.pop(request_id, None)
        if request_id in self._loading:  # its blocks hold nothing yet that could be saved
            self._jobs.given_up.append(request_id)
            return False, None
        wanted = parse(params)
        if not isinstance(wanted, TransferParams) or (key := wanted.save_key) is None:
            return False, None
        if key in self._saved:  # one of several answers to one prompt was first
            return False, params_to_load(key)
        kept = min(computed, len(tokens) - 1)  # the last sampled token has no KV yet
        if wanted.scope == "prompt":
            tokens, kept = tokens[:prompt], min(kept, prompt)
        blocks = tuple(block_ids[: -(-kept // self._block_size)])
        # Block 0 is the engine's null block: it stands where a block was given back.
        if not whole or kept < 1 or len(blocks) * self._block_size < kept or 0 in blocks:
            self._told.append(
                TransferOutcome(request_id, key, Transfer.SAVE, wanted.tag, TransferFailure.NOT_WHOLE)
            )
            return False, None
        self._saved[key] = None
        if len(self._saved) > KEYS_REMEMBERED:
            self._saved.popitem(last=False)
        self._jobs.saves.append(
            SaveJob(request_id, key, tuple(tokens), kept, blocks, tuple(images), wanted.tag)
        )
        return True, params_to_load(key)

    def report(self, outcomes: Iterable[TransferOutcome]) -> None:
        """How the worker's jobs ended. A request whose load failed is not offered one again."""
        for outcome in outcomes:
            if outcome.kind is not Transfer.LOAD:
                continue
            self._loading.discard(outcome.request_id)
            if outcome.failure and outcome.request_id in self._plans:
                self._plans[outcome.request_id] = None

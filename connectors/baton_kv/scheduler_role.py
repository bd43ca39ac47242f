"""The connector's part in the scheduler: decide which requests load an entry and which are saved.

It handles token ids, image identifiers and block ids, never a tensor. Nothing here raises: if an entry or a
request's parameters cannot be used, the request is prefilled as usual.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from baton_kv.blocks import FULL_ATTENTION, CacheGroup, GroupBlocks
from baton_kv.contract import (
    Malformed,
    Transfer,
    TransferFailure,
    TransferOutcome,
    TransferParams,
    params_to_load,
    parse,
)
from baton_kv.fingerprint import adapter_fingerprint, moved_fingerprint, renewed_fingerprint
from baton_kv.format import ImageRef, Part
from baton_kv.messages import LoadJob, PlacedMixture, SaveJob, StepJobs
from baton_kv.plan import LoadPlanner, Plan
from baton_kv.stores.base import MAX_SHARED, Store

MIN_TAIL_TOKENS = 16
"""Behind a prefix that the engine has cached, fewer tokens than this are computed faster than loaded."""
KEYS_REMEMBERED = 1024
NULL_BLOCK = 0
"""The engine's placeholder for freed blocks."""
SAVED_WITHIN_S = 1.0
"""If no save has ended for longer than this, the device may hang: nobody waits for blocks any more."""
SAYS_MOST = (
    TransferFailure.CORRUPT,
    TransferFailure.OTHER,
    TransferFailure.DEVICE,
    TransferFailure.FULL,
    TransferFailure.INCOMPATIBLE,
    TransferFailure.MALFORMED,
    TransferFailure.NOT_WHOLE,
    TransferFailure.BUSY,
    TransferFailure.MISSING,
    TransferFailure.GIVEN_UP,
)
"""Why a job failed on several ranks, the most telling reason first."""


class SchedulerRole:
    """The connector's state in the scheduler.

    Args:
        secret: the store's secret, 32 bytes.
        fingerprint: fingerprint of this engine's model and its KV.
        block_size: tokens in a block of full attention.
        ranks: number of tensor-parallel ranks, each of which does every job.
        held_blocks: number of different blocks that saves may keep from other requests.
        most_computed: most tokens that one join may compute between moved ones.
        pins: the engine's pool, for models with running states.
    """

    def __init__(
        self,
        store: Store,
        secret: bytes,
        fingerprint: str,
        block_size: int,
        ranks: int = 1,
        *,
        groups: tuple[CacheGroup, ...] = FULL_ATTENTION,
        held_blocks: int = sys.maxsize,
        most_computed: int = 0,
        pins: Pins | None = None,
    ) -> None:
        self._store = store
        self._outcomes: list[TransferOutcome] = []
        groups = tuple(group.sized(block_size) for group in groups)
        self._new_planner = partial(
            LoadPlanner, store, secret, self._outcomes, block_size, groups, most_computed=most_computed
        )
        self._fingerprint = fingerprint
        self._planner = self._new_planner(fingerprint=fingerprint)
        self._outdated: set[str] = set()
        self._block_size = block_size
        self._groups = groups
        self._states = BoundaryStates(groups, pins)
        self._plans: dict[str, Plan | None] = {}
        self._jobs = StepJobs()
        self._loading: set[str] = set()
        self._saved: OrderedDict[str, None] = OrderedDict()
        self._saving: dict[str, str] = {}
        self._held = HeldBlocks(held_blocks)
        self._several_ranks = ranks > 1
        self._ranks = RankOutcomes(ranks)

    def matched(
        self,
        request_id: str,
        params: object,
        prompt: Sequence[int],
        computed: int,
        images: Sequence[ImageRef] = (),
        salt: str | None = None,
        adapter: str | None = None,
    ) -> int:
        """Return the number of tokens beyond `computed` that can be loaded.

        vLLM calls this at every attempt to schedule a request, so the entry is read once and the plan cached.

        Args:
            params: the request's `kv_transfer_params`, not yet validated.
            prompt: token ids of the prompt.
            computed: number of tokens in the engine's prefix cache, whole blocks.
            images: the images in the prompt, in order.
            salt: the request's `cache_salt`.
            adapter: name of the LoRA adapter that the request is computed with; None: without one.
        """
        if request_id not in self._plans:
            self._plans[request_id] = self._plan(request_id, params, prompt, images, salt, adapter)
        plan = self._plans[request_id]
        brings = plan.matched - computed if plan is not None else 0
        return 0 if brings < 1 or (computed and brings < MIN_TAIL_TOKENS) else brings

    def _plan(
        self,
        request_id: str,
        params: object,
        prompt: Sequence[int],
        images: Sequence[ImageRef],
        salt: str | None,
        adapter: str | None,
    ) -> Plan | None:
        """Plan the load of a request, whose parameters are validated here; None: it loads nothing."""
        wanted = parse(params)
        if wanted is None:
            return None
        if isinstance(wanted, TransferParams) and wanted.save:
            self._states.want(request_id, len(prompt) if wanted.scope == "prompt" else sys.maxsize)
        # Moved KV of a request that shares its KV would answer others from the prefix cache.
        shares = isinstance(wanted, TransferParams) and wanted.moved and not wanted.is_apart(salt)
        if isinstance(wanted, Malformed) or shares or not wanted.uses(adapter):
            tag = None if isinstance(wanted, Malformed) else wanted.tag
            failure = TransferFailure.MALFORMED
            self._outcomes.append(TransferOutcome(request_id, "", Transfer.LOOK, tag, failure))
            return None
        if wanted.load is None:
            return None
        apart = wanted.is_apart(salt)
        planner = self._planner
        if wanted.adapter is not None:
            planner = self._new_planner(fingerprint=self._fingerprint_of(wanted))
        return planner.plan(request_id, wanted.load, wanted, prompt, images, apart=apart)

    def _fingerprint_of(self, wanted: TransferParams) -> str:
        """Return the fingerprint of a request's KV: with its adapter, if it has one."""
        used = wanted.adapter
        return (
            self._fingerprint
            if used is None
            else adapter_fingerprint(self._fingerprint, used.name, used.digest)
        )

    def renew(self) -> None:
        """Use no KV that was saved before, and save none of the requests that have begun.

        The weights may be others from now on, which no file of them tells: what is saved is for this engine
        alone, until the next time.
        """
        self._fingerprint = renewed_fingerprint(self._fingerprint)
        self._planner = self._new_planner(fingerprint=self._fingerprint)
        self._outdated |= set(self._plans)
        self._plans = dict.fromkeys(self._plans)

    def take_outcomes(self) -> list[TransferOutcome]:
        """Return the outcomes since the last call: of jobs, failed looks, and saves that were not begun."""
        outcomes = list(self._outcomes)
        self._outcomes.clear()
        return outcomes

    def allocated(self, request_id: str, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Plan the load of a request that was given blocks of each cache group, in the order of the context.

        `external` is the number of tokens to load, as returned by `matched`.
        """
        plan = self._plans.get(request_id)
        if external <= 0 or plan is None:
            return
        has = plan.matched - external
        joined = plan.joined.after(has) if plan.joined is not None else None
        self._loading.add(request_id)
        self._jobs.loads.append(
            LoadJob(
                request_id,
                plan.parts[-1].key,
                self._loaded_blocks(block_ids, plan, has),
                external,
                plan.fingerprint,
                plan.parts[-1].digest,
                plan.tag,
                joined,
                tuple(block_ids[0][: -(-plan.matched // self._block_size)]) if joined is not None else (),
            )
        )

    def placed(self, params: object, block_ids: Sequence[Sequence[int]], salt: str | None) -> None:
        """Note the mixture, if it has one, of a request that was given blocks to compute all of it."""
        wanted = parse(params)
        if not isinstance(wanted, TransferParams) or wanted.mixture is None:
            return
        if wanted.is_apart(salt) and block_ids[0]:
            self._jobs.mixtures.append(PlacedMixture(block_ids[0][0] * self._block_size, wanted.mixture))

    def _loaded_blocks(
        self, block_ids: Sequence[Sequence[int]], plan: Plan, has: int
    ) -> tuple[GroupBlocks, ...]:
        """Select the blocks that a plan fills, by their places in the entry that it loads."""
        blocks = zip(self._groups, self._blocks_of(block_ids, plan.in_place, has), strict=True)
        return tuple(
            GroupBlocks(plan.state, each.ids) if group.state and plan.state is not None else each
            for group, each in blocks
        )

    def _blocks_of(
        self, block_ids: Sequence[Sequence[int]], tokens: int, local: int = 0
    ) -> tuple[GroupBlocks, ...]:
        """Select the blocks of each cache group that a continuation after this many tokens needs.

        Args:
            block_ids: a request's blocks of each cache group, in the order of the context.
            tokens: number of tokens.
            local: number of tokens, from the first, whose whole blocks are left out.
        """
        found = []
        for group, ids in zip(self._groups, block_ids, strict=True):
            first = max(local // group.tokens, group.first_block(tokens))
            found.append(GroupBlocks(first, tuple(ids[first : group.count(tokens)])))
        return tuple(found)

    def step(self) -> StepJobs:
        """Return the jobs of this engine step and start collecting those of the next."""
        jobs, self._jobs = self._jobs, StepJobs()
        return jobs

    def offered(self, request_id: str, states: Sequence[tuple[int, int, int]]) -> None:
        """Note blocks that hold a request's running state at their end, once this step has run.

        Each is a cache group, a block and the number of tokens that the state is after.
        """
        self._states.offer(request_id, states)

    def finished(
        self,
        request_id: str,
        params: object,
        *,
        tokens: Sequence[int],
        prompt: int,
        computed: int,
        block_ids: Sequence[Sequence[int]],
        whole: bool,
        images: Sequence[ImageRef] = (),
        adapter: str | None = None,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Plan the save of a finished request, if the request asked for one.

        Args:
            params: the request's `kv_transfer_params`.
            tokens: every token id of the context, including generated ones.
            prompt: number of prompt tokens.
            computed: number of tokens that have KV.
            block_ids: the request's blocks of each cache group, in the order of the context.
            whole: whether the request ended by itself and its context is token ids and images alone.
            images: the images in the prompt, in order.
            adapter: name of the LoRA adapter that the request was computed with; None: without one.

        Returns:
            Whether the blocks must be held until the save is reported, and the answer's `kv_transfer_params`.
        """
        saves = self._finished(
            request_id,
            params,
            tokens=tokens,
            prompt=prompt,
            computed=computed,
            block_ids=block_ids,
            whole=whole,
            images=images,
            adapter=adapter,
        )
        if not saves[0]:
            self._states.release(request_id)
        return saves

    def _finished(
        self,
        request_id: str,
        params: object,
        *,
        tokens: Sequence[int],
        prompt: int,
        computed: int,
        block_ids: Sequence[Sequence[int]],
        whole: bool,
        images: Sequence[ImageRef],
        adapter: str | None,
    ) -> tuple[bool, dict[str, Any] | None]:
        plan = self._plans.pop(request_id, None)
        if request_id in self._outdated:
            self._outdated.remove(request_id)
            whole = False
        if (found := self._save_wanted(request_id, params)) is None:
            return False, None
        wanted, key = found
        if key in self._saved:  # with `n` > 1, only the first answer is saved
            return False, params_to_load(key)
        kept = min(computed, len(tokens) - 1)  # the last sampled token has no KV yet
        if wanted.scope == "prompt":
            tokens, kept = tokens[:prompt], min(kept, prompt)
        if wanted.least and kept - (plan.shared if plan is not None else 0) < wanted.least:
            return False, None
        whole = whole and wanted.uses(adapter)
        last = kept if kept == computed else 0
        blocks, states = self._states.among(request_id, self._blocks_of(block_ids, kept), kept, last)
        held = [block for ids in block_ids for block in ids if block != NULL_BLOCK]
        held += self._states.held(request_id)
        parts = self._parts_before(plan, key, kept) if plan is not None else ()
        if len(parts) > MAX_SHARED:
            parts = self._fewer(parts, blocks, held, awaited=not wanted.least)
        written = self._written(blocks, parts) if wanted.least else None
        if (failure := self._refusal(blocks, kept, held, whole, written)) is not None:
            self._outcomes.append(TransferOutcome(request_id, key, Transfer.SAVE, wanted.tag, failure))
            return False, None
        self._held.hold(request_id, held, yields=written is not None)
        made_by = self._fingerprint_of(wanted)
        job = SaveJob(
            request_id,
            key,
            tuple(tokens),
            kept,
            blocks,
            made_by if wanted.apart is None else moved_fingerprint(made_by),
            draft=secrets.token_hex(16),
            images=tuple(images),
            parts=parts,
            source=plan.parts[-1].key if plan is not None else "",
            states=states,
            tag=wanted.tag,
        )
        self._save(job)
        return True, params_to_load(key)

    def _save_wanted(self, request_id: str, params: object) -> tuple[TransferParams, str] | None:
        """Return a finished request's parameters and the key to save under; None: nothing is saved."""
        if request_id in self._loading:  # its blocks are not filled yet
            self._jobs.given_up.append(request_id)
            return None
        wanted = parse(params)
        if not isinstance(wanted, TransferParams) or wanted.mixture is not None:
            return None  # what follows a mixture is not the KV of its token ids
        if (key := wanted.save_key) is None:
            return None
        return wanted, key

    def _written(self, blocks: tuple[GroupBlocks, ...], parts: tuple[Part, ...]) -> int:
        """Return the number of a context's blocks that its save writes.

        Parts spare those of the groups that keep all blocks; what windows and states need is written whole.
        """
        first = parts[-1].stop if parts else 0
        groups = zip(self._groups, blocks, strict=True)
        return sum(
            max(0, each.indexes.stop - max(first, each.first)) if group.keeps_all else len(each.ids)
            for group, each in groups
        )

    def _fewer(
        self, parts: tuple[Part, ...], blocks: tuple[GroupBlocks, ...], held: Sequence[int], *, awaited: bool
    ) -> tuple[Part, ...]:
        """Return the first half of too many parts, or more, behind which the save writes no more than it may.

        Args:
            awaited: somebody waits for the save, which may write as much as it holds.
        """
        counts = range(MAX_SHARED // 2, MAX_SHARED)
        fewer = (parts[:count] for count in counts)
        return next(
            (each for each in fewer if awaited or self._held.has_room_for(held, self._written(blocks, each))),
            parts[:MAX_SHARED],
        )

    def _refusal(
        self,
        blocks: tuple[GroupBlocks, ...],
        kept: int,
        held: Sequence[int],
        whole: bool,
        written: int | None,
    ) -> TransferFailure | None:
        """Check whether a context may be saved with `kept` tokens; return the reason against it, or None.

        Args:
            written: number of blocks that a save that nobody waits for writes; None: somebody waits for it.
        """
        groups = zip(self._groups, blocks, strict=True)
        if not whole or kept < 1 or not all(_is_whole(group, each, kept) for group, each in groups):
            return TransferFailure.NOT_WHOLE
        return None if self._held.has_room_for(held, written) else TransferFailure.BUSY

    def _parts_before(self, plan: Plan, key: str, kept: int) -> tuple[Part, ...]:
        """Select the entries that hold the first blocks of a context already, as parts of its entry `key`.

        The last block is never among them. An entry keeps whole files of others, of its own scope only, so
        they end where it would use less than half of one. There may be more than `MAX_SHARED`.
        """
        whole = min(plan.shared, kept - 1) // self._block_size
        if len({group.tokens for group in self._groups if group.keeps_all}) != 1:
            return ()  # none keeps all blocks, or several count them in different ways
        parts, reached = [], 0
        for part in plan.parts:
            if 2 * (min(part.stop, whole) - reached) < part.stop - reached or reached >= whole:
                break
            parts.append(replace(part, stop=min(part.stop, whole)))
            reached = part.stop
        scopes = {each.partition("/")[0] for each in (key, *(part.key for part in plan.parts))}
        return tuple(parts) if len(scopes) == 1 else ()

    def _save(self, job: SaveJob) -> None:
        """Add a save to this step's jobs."""
        if self._several_ranks:
            self._saving[job.request_id] = job.draft
        self._saved[job.key] = None
        if len(self._saved) > KEYS_REMEMBERED:
            self._saved.popitem(last=False)
        self._jobs.saves.append(job)

    @property
    def blocks_free_soon(self) -> bool:
        """True if saves hold blocks and are expected to end within a second."""
        return self._held.free_soon

    def report(self, outcomes: Iterable[TransferOutcome]) -> None:
        """Record how the jobs ended on the ranks; a request whose load failed does not load again."""
        for outcome in self._ranks.add(outcomes):
            if outcome.kind is Transfer.SAVE:
                self._held.release(outcome.request_id)
                self._states.release(outcome.request_id)
                self._outcomes.append(self._saved_or_lost(outcome))
                continue
            self._outcomes.append(outcome)
            self._loading.discard(outcome.request_id)
            if outcome.failure and outcome.request_id in self._plans:
                self._plans[outcome.request_id] = None

    def _saved_or_lost(self, outcome: TransferOutcome) -> TransferOutcome:
        """Check the outcome of a save by several ranks: an entry that is not there is lost."""
        draft = self._saving.pop(outcome.request_id, None)
        if draft is None:
            return outcome
        self._store.discard(draft)
        if outcome.failure is None and not self._store.exists(outcome.key):
            return replace(outcome, failure=TransferFailure.DEVICE)
        return outcome

    def shutdown(self) -> None:
        """Remove the drafts that no rank will complete any more; the workers have ended."""
        for draft in self._saving.values():
            self._store.discard(draft)
        self._saving.clear()


def _is_whole(group: CacheGroup, blocks: GroupBlocks, tokens: int) -> bool:
    """Return whether a group's blocks reach up to so many tokens, and none of them was freed.

    Of a running state one block is enough, of whatever length: it is only loaded for that.
    """
    reached = blocks.ids if group.state else blocks.indexes.stop >= group.count(tokens)
    return bool(reached) and NULL_BLOCK not in blocks.ids


class Pins(Protocol):
    """Blocks of the engine's pool that stay as they are although no request uses them."""

    def pin(self, block: int) -> None:
        """Keep a block."""

    def unpin(self, block: int) -> None:
        """Give a block back that was kept once."""


class BoundaryStates:
    """The last running state at the end of a block, of each request that saves, for each group with states.

    A request's own block has the state after all its tokens, and is overwritten by the next one. So without
    these a context could not be saved without its answer, nor continued but behind its last token.
    """

    def __init__(self, groups: Sequence[CacheGroup], pins: Pins | None) -> None:
        self._groups = groups
        self._pins = pins if any(group.state for group in groups) else None
        self._most: dict[str, int] = {}
        self._pinned: dict[str, dict[int, tuple[int, int]]] = {}

    def want(self, request_id: str, most: int) -> None:
        """Keep the states of a request after up to so many tokens."""
        if self._pins is not None:
            self._most[request_id] = most

    def offer(self, request_id: str, states: Sequence[tuple[int, int, int]]) -> None:
        """Keep the last of these states, each a cache group, a block and a number of tokens."""
        most = self._most.get(request_id, 0)
        for index, block, tokens in states:
            pinned = self._pinned.get(request_id, {})
            _, before = pinned.get(index, (NULL_BLOCK, 0))
            whole = self._groups[index].state and tokens % self._groups[index].tokens == 0
            if self._pins is None or not whole or block == NULL_BLOCK or not before < tokens <= most:
                continue
            self._pins.pin(block)
            if index in pinned:
                self._pins.unpin(pinned[index][0])
            self._pinned.setdefault(request_id, {})[index] = (block, tokens)

    def among(
        self, request_id: str, blocks: tuple[GroupBlocks, ...], kept: int, last: int
    ) -> tuple[tuple[GroupBlocks, ...], tuple[int, ...]]:
        """Put states among the blocks of a context of `kept` tokens; return after how many tokens they are.

        Args:
            blocks: the blocks of each cache group that a continuation after `kept` tokens needs.
            last: number of tokens that the request's own blocks hold the state after; 0 if it is of no use.
        """
        pinned = self._pinned.get(request_id, {})
        places = {tokens for _, tokens in pinned.values()}
        same = len(places) == 1 and len(pinned) == sum(group.state for group in self._groups)
        before = places.pop() if same and max(places) <= kept and max(places) != last else 0
        found = []
        for index, (group, each) in enumerate(zip(self._groups, blocks, strict=True)):
            if group.state:
                ids = ((pinned[index][0],) if before else ()) + (each.ids if last else ())
                each = GroupBlocks(0, ids)
            found.append(each)
        states = (before, last) if any(group.state for group in self._groups) else ()
        return tuple(found), tuple(state for state in states if state)

    def held(self, request_id: str) -> list[int]:
        """Return the blocks that are kept for a request."""
        return [block for block, _ in self._pinned.get(request_id, {}).values()]

    def release(self, request_id: str) -> None:
        """Give back what is kept for a request that has ended, or whose save has."""
        self._most.pop(request_id, None)
        for block, _ in self._pinned.pop(request_id, {}).values():
            assert self._pins is not None
            self._pins.unpin(block)


class HeldBlocks:
    """The blocks that are held until a save has read them. Requests may share blocks of a common prefix.

    Args:
        most: number of different blocks that saves may hold together; a save that somebody waits for may hold
            more while it is the only one.
    """

    YIELDING = 2
    """Saves that nobody waits for begin only while saves hold less than the most divided by this."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._saves: dict[str, tuple[int, ...]] = {}
        self._yielding: set[str] = set()
        self._holders: Counter[int] = Counter()
        self._awaited: Counter[int] = Counter()
        self._moved = 0.0

    @property
    def free_soon(self) -> bool:
        """True if saves hold blocks, and one began or ended within the last second: more will be free."""
        return bool(self._saves) and time.monotonic() - self._moved < SAVED_WITHIN_S

    def has_room_for(self, block_ids: Sequence[int], written: int | None = None) -> bool:
        """Check whether a save may hold these blocks.

        A save that nobody waits for leaves room for those that somebody waits for, which do not count the
        blocks that it holds. The only one of all may hold more than the most if it writes few: it ends soon.

        Args:
            written: number of blocks that a save that nobody waits for writes; None: somebody waits for it.
        """
        holders = self._awaited if written is None else self._holders
        new, less = len(set(block_ids) - holders.keys()), self._most // self.YIELDING
        if not holders:
            return written is None or new <= self._most or written <= less
        return len(holders) + new <= (self._most if written is None else less)

    def hold(self, request_id: str, block_ids: Sequence[int], *, yields: bool = False) -> None:
        """Count the blocks of a request whose save begins."""
        if not self._saves:
            self._moved = time.monotonic()
        self._saves[request_id] = tuple(set(block_ids))
        self._holders.update(self._saves[request_id])
        if yields:
            self._yielding.add(request_id)
        else:
            self._awaited.update(self._saves[request_id])

    def release(self, request_id: str) -> None:
        """Forget the blocks of a request whose save has ended on every rank."""
        self._moved = time.monotonic()
        blocks = Counter(self._saves.pop(request_id, ()))
        self._holders -= blocks  # drops those that nobody holds
        if request_id in self._yielding:
            self._yielding.remove(request_id)
        else:
            self._awaited -= blocks


class RankOutcomes:
    """The outcomes of jobs that some of the ranks have ended, each of which ends every job once."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ended: dict[tuple[str, Transfer], list[TransferOutcome]] = {}

    def add(self, outcomes: Iterable[TransferOutcome]) -> Iterator[TransferOutcome]:
        """Add outcomes of ranks; yield one outcome for each job that all ranks have ended."""
        for outcome in outcomes:
            job = (outcome.request_id, outcome.kind)
            ended = self._ended.setdefault(job, [])
            ended.append(outcome)
            if len(ended) == self._ranks:
                yield combined(self._ended.pop(job))


def combined(outcomes: list[TransferOutcome]) -> TransferOutcome:
    """Combine the outcomes of one job: it failed if one rank failed, and took as long as the slowest.

    Of several failures the one that says most counts: a rank that finds an entry corrupt removes it, and the
    next then finds it missing.
    """
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    return replace(
        outcomes[0],
        failure=min(failures, key=SAYS_MOST.index, default=None),
        bytes=sum(outcome.bytes for outcome in outcomes),
        resident=sum(outcome.resident for outcome in outcomes),
        seconds=max(outcome.seconds for outcome in outcomes),
    )

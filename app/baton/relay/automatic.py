"""Load stored KV for requests that name no handoff, and save theirs, without a change of any client.

Once the token ids of a prompt are known, the tenant's stored context that shares most of them is looked up,
and the planner decides whether its KV is loaded. When the answer is complete, the context is saved if that is
worth it. Clients do not see such handoffs, which have no messages, and they are evicted before others.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from baton.config.groups import AutomaticMode, HandoffSettings
from baton.engines.backend import Json, Operation
from baton.engines.engine import LocalEngine
from baton.engines.transfers import TransferReport, TransferRequest
from baton.images.image import with_distinct_images
from baton.library.handoff import Context, Handoff, PrefixMatch, key_of, new_id
from baton.library.library import Library
from baton.relay.asked import OPERATIONS
from baton.relay.audit import Audits
from baton.relay.cost import Choice, Decision, LoadCost
from baton.relay.report import KV_IS_GONE, REASONS, Miss, diagnostics
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import HandoffMetrics
from baton_kv.contract import TransferFailure
from baton_kv.format import ImageRef

# Decide which contexts are worth saving, for requests that do not ask for it.


LONG = 8
"""A prompt without messages is long if it has so many times the fewest tokens that are worth saving."""
TRIED = 32
"""So many contexts of a tenant are saved before it counts how many of them were used."""
USED_SHARE = 1 / 8
"""With a smaller share in use, a tenant's new contexts are not saved until one of them is seen again."""
COUNTED = 256
"""After so many saves the counts of a tenant are halved, so that what it does now counts most."""
BEGUN_S = 5.0
"""For so long after a save was chosen, no other is that shares half of its prompt with it, unless it goes on
after all of it."""
TENANTS = 10_000
SEEN = 10_000
"""Most prompts that are remembered, of all tenants, to see whether one comes again; each has a share."""


@dataclass
class HitCount:
    """The number of a tenant's automatic handoffs, and of those that were used.

    Attributes:
        used: number of requests that continued one of them, which shared more with no other.
    """

    saved: int = 0
    used: int = 0


@dataclass(frozen=True)
class Sent:
    """A prompt that was sent.

    Attributes:
        at: monotonic seconds.
        length: number of its tokens, if more of it is remembered than its beginning.
    """

    at: float
    length: int = 0
    digest: bytes = b""

    def is_continued_by(self, prompt: Sequence[int]) -> bool:
        """Check whether a prompt begins with all of this one and goes on."""
        return 0 < self.length < len(prompt) and _digest(prompt[: self.length]) == self.digest


class Prompts:
    """Beginnings of prompts that tenants sent. Whoever sent most forgets first."""

    def __init__(self) -> None:
        self._tenants: dict[str, OrderedDict[bytes, Sent]] = {}
        self._count = 0

    def pop(self, tenant: str, prompt: Sequence[int]) -> Sent | None:
        """Forget a beginning; returns what was sent with it, None: it is not known."""
        found = self._tenants.get(tenant, OrderedDict()).pop(_digest(prompt), None)
        self._count -= found is not None
        return found

    def add(self, tenant: str, prompt: Sequence[int], sent: Sent) -> None:
        """Remember a beginning that is not known."""
        self._tenants.setdefault(tenant, OrderedDict())[_digest(prompt)] = sent
        self._count += 1
        if self._count <= SEEN:
            return
        over = tenant
        if len(self._tenants[tenant]) <= SEEN // len(self._tenants):
            over = max(self._tenants, key=lambda each: len(self._tenants[each]))
        self._tenants[over].popitem(last=False)
        self._count -= 1
        if not self._tenants[over]:
            del self._tenants[over]


class SaveRule:
    """Saves what is likely to be continued: conversations, long prompts, and what is seen twice.

    Requests that share only a long beginning, such as one question about each of many documents, leave
    contexts that nobody continues. Once most of a tenant's are like that, only those are saved that go on
    after a saved one or are seen again.

    Args:
        least: fewest tokens, beyond those that are stored already, that are worth saving.
        clock: monotonic seconds.
    """

    def __init__(self, least: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._least = least
        self._clock = clock
        self._begun = Prompts()
        self._usage: OrderedDict[str, HitCount] = OrderedDict()
        self._seen = Prompts()

    def is_worth_saving(
        self, tenant: str, prompt: Sequence[int], match: PrefixMatch | None, *, conversation: bool
    ) -> bool:
        """Return whether the context of a request should be saved when it is answered.

        Args:
            match: the stored context that it shares most tokens with.
            conversation: whether it consists of messages.

        Raises:
            OverflowError: a token id does not fit into 32 bits.
        """
        again = self._seen_before(tenant, prompt, match.tokens if match is not None else 0)
        if match is not None and match.continues:
            return True
        likely = conversation or len(prompt) >= LONG * self._least
        worth = again or (likely and not self._mostly_unused(tenant))
        return worth and not self._just_begun(tenant, prompt)

    def saved(self, tenant: str) -> None:
        """Count a save."""
        usage = self._usage_of(tenant)
        usage.saved += 1
        if usage.saved >= COUNTED:
            usage.saved, usage.used = usage.saved // 2, usage.used // 2

    def used(self, tenant: str) -> None:
        """Count a request that continued a saved context."""
        self._usage_of(tenant).used += 1

    def _mostly_unused(self, tenant: str) -> bool:
        usage = self._usage_of(tenant)
        return usage.saved >= TRIED and usage.used < usage.saved * USED_SHARE

    def _usage_of(self, tenant: str) -> HitCount:
        usage = self._usage.setdefault(tenant, HitCount())
        self._usage.move_to_end(tenant)
        if len(self._usage) > TENANTS:
            self._usage.popitem(last=False)
        return usage

    def _just_begun(self, tenant: str, prompt: Sequence[int]) -> bool:
        """Return whether a prompt that shares at least half of this one was found worth saving just now.

        What agents that begin at the same time share is saved once. A prompt that goes on after all of the
        other one is the same agent's next, which is sent as soon as its tool has answered.
        """
        shared = prompt[: 1 << max(0, len(prompt).bit_length() - 1)]
        now = self._clock()
        before = self._begun.pop(tenant, shared)
        if before is not None and now - before.at < BEGUN_S and not before.is_continued_by(prompt):
            self._begun.add(tenant, shared, before)
            return True
        self._begun.add(tenant, shared, Sent(now, len(prompt), _digest(prompt)))
        return False

    def _seen_before(self, tenant: str, prompt: Sequence[int], stored: int) -> bool:
        """Return whether a prompt began so before, up to the fewest tokens that would be worth saving."""
        begins = prompt[: stored + self._least]
        seen = self._seen.pop(tenant, begins) is not None
        self._seen.add(tenant, begins, Sent(self._clock()))
        return seen


def _digest(prompt: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", prompt).tobytes(), digest_size=16).digest()


# Read the fields by which clients of other servers ask for their prompts to be cached.
#
# Sources: Anthropic's Messages API, `cache_control` with `ttl` `5m` or `1h`; OpenAI's `prompt_cache_key` and
# `prompt_cache_retention`. A hint is never an error: what is not understood is ignored.


LIVES_S = {"5m": 300, "1h": 3600}
DEFAULT_LIFE = "5m"


@dataclass(frozen=True)
class SaveWish:
    """A client's wish that the context of a request is saved.

    Attributes:
        ttl_s: seconds that it should live; None: as long as the settings say.
        cache_key: digest of its `prompt_cache_key`, by which its context is brought into memory later.
    """

    ttl_s: int | None = None
    cache_key: str | None = None


def save_wish(operation: Operation, body: Json) -> SaveWish | None:
    """Return the wish in a request's body; None: there is none."""
    if operation is Operation.MESSAGES:
        lives = [_life_of(marked["cache_control"]) for marked in _marked(body)]
        return SaveWish(max(lives)) if lives else None
    key = body.get("prompt_cache_key")
    if key or body.get("prompt_cache_retention") == "24h":
        return SaveWish(cache_key=key_digest(key) if isinstance(key, str) and key else None)
    return None


def key_digest(key: str) -> str:
    """Return the digest by which records hold a `prompt_cache_key`: keys may be long, or somebody's name."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _life_of(control: Json) -> int:
    return LIVES_S.get(str(control.get("ttl")), LIVES_S[DEFAULT_LIFE])


def _marked(body: Json) -> Iterator[Json]:
    """Yield the objects of a body of `/v1/messages` that have `cache_control`."""
    for each in (body, *_objects(body.get("system")), *_objects(body.get("tools"))):
        if isinstance(each.get("cache_control"), dict):
            yield each
    for message in _objects(body.get("messages")):
        for part in _objects(message.get("content")):
            if isinstance(part.get("cache_control"), dict):
                yield part


def _objects(value: object) -> list[Json]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


CONVERSATIONS = OPERATIONS - {Operation.COMPLETIONS}
"""Operations whose prompts are written from messages."""
INCOMPATIBLE = 10_000
"""Most handoffs that are remembered because an engine cannot load them."""

log = structlog.get_logger("baton.handoffs")


@dataclass(frozen=True)
class AutomaticHandoffs:
    """Automatic handoffs of one gateway.

    Attributes:
        cost: decides whether KV is loaded or prefilled.
        metrics: where handoffs are counted.
        modes: what is automatic for each engine, by its name.
        rule: decides what is saved.
        audits: computes some answers again.
        incompatible: pairs of an engine's name and the id of a handoff whose KV it cannot load, though their
            weights are equal; the oldest first.
    """

    handoffs: Library
    cost: LoadCost
    metrics: HandoffMetrics
    settings: HandoffSettings
    modes: Mapping[str, AutomaticMode]
    rule: SaveRule
    audits: Audits
    incompatible: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict)

    def request(
        self, engine: LocalEngine, operation: Operation, body: Json, tenant: str
    ) -> AutomaticRequest | None:
        """Make the chooser of transfers for a request that names no handoff; None: nothing is automatic."""
        mode = self.modes.get(engine.base, self.settings.auto)
        if mode == "off" or not engine.supports_handoffs or operation not in OPERATIONS:
            return None
        if body.get("use_beam_search"):  # each of its steps is a request to the engine
            return None
        wish = save_wish(operation, body)
        return AutomaticRequest(
            self, engine, tenant, saves=mode == "on", conversation=operation in CONVERSATIONS, wish=wish
        )

    def find(
        self, engine: LocalEngine, tenant: str, prompt: Sequence[int]
    ) -> tuple[PrefixMatch | None, Miss]:
        """Return the tenant's stored context that shares most tokens, and their images, with a prompt.

        Args:
            prompt: token ids, in which other images are other numbers; see `with_distinct_images`.

        Returns:
            The context, and why there is none if it is None.
        """
        elsewhere: list[Handoff] = []
        passed: list[Miss] = []

        def usable(record: Handoff) -> bool:
            if self.handoffs.has_expired(record):
                passed.append(Miss.EXPIRED)
                return False
            if (engine.name, record.id) in self.incompatible:
                passed.append(Miss.KV_INCOMPATIBLE)
                return False
            if not (here := self.handoffs.is_here(record)):
                elsewhere.append(record)
                passed.append(Miss.NOT_HERE)
            return here

        match = self.handoffs.longest_prefix(tenant, engine.weights, prompt, usable)
        if elsewhere:  # this request does not wait for it; the next one finds it here
            self.handoffs.in_background(self.handoffs.fetch_here(elsewhere[0], engine))
        self.metrics.automatic_lookups.labels("found" if match is not None else "none").inc()
        return match, next(iter(passed), Miss.NO_CANDIDATE)

    def save(
        self,
        engine: LocalEngine,
        tenant: str,
        handoff_id: str,
        transfer: TransferRequest,
        tokens: list[int],
        images: Sequence[ImageRef],
        wish: SaveWish,
    ) -> None:
        """Register a context that the engine saves as a handoff."""
        record = self.handoffs.begin(
            engine, tenant, ttl_s=wish.ttl_s, automatic=handoff_id, cache_key=wish.cache_key
        )
        self.handoffs.end(record, transfer, tokens, Context(positions=images))
        self.rule.saved(tenant)
        self.metrics.automatic_saves.inc()

    def note_load(self, engine: LocalEngine, match: PrefixMatch, report: TransferReport) -> None:
        """Count what a request loaded, and forget KV that could not be used."""
        if match.alone:
            self.rule.used(match.record.tenant)
        if report.miss is TransferFailure.INCOMPATIBLE:
            self._note_incompatible(engine, match.record)
        elif report.miss in KV_IS_GONE or (report.lost and match.record.automatic):
            self.handoffs.kv_gone(match.record)
        if report.loaded and not report.lost:
            self.handoffs.note_use(match.record, "loaded", None, loaded=report.loaded, resident=0)
            self.metrics.tokens_reused.inc(report.loaded)
            self.metrics.saved_prefill.inc(engine.throughput.prefill_s(report.loaded) or 0)

    def _note_incompatible(self, engine: LocalEngine, record: Handoff) -> None:
        """Remember that an engine of this gateway cannot load a handoff; elsewhere one of its name might."""
        self.incompatible[engine.name, record.id] = None
        if len(self.incompatible) > INCOMPATIBLE:
            self.incompatible.popitem(last=False)


@dataclass(frozen=True)
class ChosenTransfer:
    """The transfer that was chosen for one prompt.

    Attributes:
        match: the stored context that the prompt shares most tokens with.
        save_id: id of the handoff that is saved; None: none.
        images: the images of the prompt, in order.
    """

    match: PrefixMatch | None
    save_id: str | None
    images: Sequence[ImageRef]


@dataclass
class Looked:
    """The stored part of one prompt, or why there is none.

    Attributes:
        why: why nothing of it is reused, if nothing is.
        shared: number of its tokens that the stored context shares which shares most; None: there is none.
    """

    why: Miss
    shared: int | None


class AutomaticRequest:
    """Chooses transfers for one request; see `baton.engines.transfers.TransferChooser`.

    Args:
        saves: whether contexts are saved that are likely to be continued.
        conversation: whether the prompt is written from messages.
        wish: the client's own wish that its context is saved.
    """

    def __init__(
        self,
        automatic: AutomaticHandoffs,
        engine: LocalEngine,
        tenant: str,
        *,
        saves: bool,
        conversation: bool,
        wish: SaveWish | None = None,
    ) -> None:
        self._automatic = automatic
        self._engine = engine
        self._tenant = tenant
        self._saves = saves
        self._conversation = conversation
        self._wish = wish
        self._choices: dict[TransferRequest, ChosenTransfer] = {}
        self._looked: list[Looked] = []
        self._looks: dict[TransferRequest, Looked] = {}

    def choose(
        self, prompt: Sequence[int], images: Sequence[ImageRef] = (), *, loads: bool, saves: bool
    ) -> TransferRequest | None:
        try:
            return self._choose(prompt, images, loads=loads, saves=saves)
        except OverflowError:  # no model has such a token: the engine refuses the prompt
            return None
        except Exception as error:  # a fault of this cache must not cost an answer
            log.error("automatic_handoff_failed", exc_info=error)
            self._automatic.metrics.automatic_lookups.labels("failed").inc()
            return None

    def _choose(
        self, prompt: Sequence[int], images: Sequence[ImageRef], *, loads: bool, saves: bool
    ) -> TransferRequest | None:
        prompt = with_distinct_images(prompt, images)
        match, why = self._automatic.find(self._engine, self._tenant, prompt)
        save_id = new_id(automatic=True) if saves and self._is_worth_saving(prompt, match) else None
        least = self._automatic.settings.auto_min_tokens
        decision = self._decide(match) if loads and match is not None and match.tokens >= least else None
        transfer = TransferRequest(
            save=key_of(self._tenant, save_id) if save_id is not None else None,
            load=_named(match, decision, save_id),
            limit=_limit(match, decision),
            least=least,
            # The pixels of its images, which an audit would need, are in vLLM's hands alone.
            audited=bool(decision and decision.loads and not images and self._automatic.audits.chosen()),
        )
        if match is not None:
            slower = decision is not None and decision.choice is Choice.RECOMPUTE
            why = Miss.SLOWER_TO_LOAD if slower else Miss.BELOW_MINIMUM if decision is None else Miss.NOT_USED
        looked = Looked(why if loads else Miss.PROMPT_LOGPROBS, match.tokens if match is not None else None)
        self._looked.append(looked)
        if not transfer.moves_kv:
            return None
        self._looks[transfer] = looked
        self._choices[transfer] = ChosenTransfer(match, save_id, images)
        return transfer

    def _is_worth_saving(self, prompt: Sequence[int], match: PrefixMatch | None) -> bool:
        if not self._saves and self._wish is None:
            return False
        likely = self._conversation or self._wish is not None
        return self._automatic.rule.is_worth_saving(self._tenant, prompt, match, conversation=likely)

    def _decide(self, match: PrefixMatch) -> Decision:
        decision = self._automatic.cost.decide(self._engine, match.record, match.tokens)
        self._automatic.metrics.decisions.labels(decision.choice.value).inc()
        return decision

    def ended(self, transfer: TransferRequest) -> None:
        try:
            self._end(transfer)
        except Exception as error:  # a fault of this cache must not cost an answer
            log.error("automatic_handoff_failed", exc_info=error)

    def diagnostics(self, context: RequestContext) -> Json | None:
        """Sum up its prompts: a hit if anything of any was reused, else why not of the first.

        None: nobody has looked for stored KV, as for prompts that hold other media than images.

        Args:
            context: its counts of tokens, now that the answer is complete.
        """
        if not self._looked:
            return None
        first = self._looked[0]
        why = None if context.cached_tokens else first.why
        return diagnostics(why, context.prompt_tokens, first.shared)

    def _end(self, transfer: TransferRequest) -> None:
        choice, report = self._choices.pop(transfer), transfer.report
        looked = self._looks.pop(transfer)
        if report.lost:
            looked.why = Miss.LOAD_FAILED
        elif report.miss is not None and looked.why is Miss.NOT_USED:
            looked.why = Miss(REASONS.get(report.miss, Miss.NOT_USED))
        stored = 0
        if choice.match is not None:
            self._automatic.note_load(self._engine, choice.match, report)
            self._automatic.audits.note(self._engine, choice.match.record, transfer)
            stored = 0 if report.miss is not None or report.lost else choice.match.tokens
        tokens = report.prompt_ids + report.output_ids
        if choice.save_id is None or not report.saves or len(tokens) - stored < transfer.least:
            return
        wish = self._wish or SaveWish()
        self._automatic.save(
            self._engine, self._tenant, choice.save_id, transfer, tokens, choice.images, wish
        )


def _named(match: PrefixMatch | None, decision: Decision | None, save_id: str | None) -> str | None:
    """Return the key of the stored KV that is loaded, or that the saved KV shares files with."""
    loads = decision is not None and decision.loads
    return match.record.key if match is not None and (loads or save_id is not None) else None


def _limit(match: PrefixMatch | None, decision: Decision | None) -> int:
    """Return the most tokens to load."""
    if match is None or decision is None:
        return 0
    return match.tokens if decision.limit is None else min(match.tokens, decision.limit)

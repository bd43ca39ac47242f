"""Load stored KV for requests that name no handoff, and save theirs, without a change of any client.

Once the token ids of a prompt are known, the tenant's stored context that shares most of them is looked up,
and the planner decides whether its KV is loaded. When the answer is complete, the context is saved if that is
worth it. Clients do not see such handoffs, which have no messages, and they are evicted before others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from baton.config.groups import AutomaticMode, HandoffSettings
from baton.engines.kv_transfer import TransferReport, TransferRequest
from baton.engines.port import Engine, Json, Operation
from baton.handoffs.audits.service import Audits
from baton.handoffs.automatic.save_rule import SaveRule
from baton.handoffs.automatic.save_wish import SaveWish, save_wish
from baton.handoffs.options import OPERATIONS
from baton.handoffs.outcome import KV_IS_GONE
from baton.handoffs.planner import Decision, Planner
from baton.handoffs.records.prefix_index import PrefixMatch
from baton.handoffs.records.record import HandoffRecord, key_of, new_id
from baton.handoffs.service import Handoffs
from baton.images.image_position import ImagePosition, with_distinct_images
from baton.telemetry.metrics import HandoffMetrics
from baton_kv.contract import TransferFailure

CONVERSATIONS = OPERATIONS - {Operation.COMPLETIONS}
"""Operations whose prompts are written from messages."""
INCOMPATIBLE = 10_000
"""Most handoffs that are remembered because an engine cannot load them."""

log = structlog.get_logger("baton.handoffs")


@dataclass(frozen=True)
class AutomaticHandoffs:
    """Automatic handoffs of one gateway.

    Attributes:
        handoffs: all handoffs.
        planner: decides whether KV is loaded or prefilled.
        metrics: where handoffs are counted.
        settings: limits of handoffs.
        modes: what is automatic for each engine, by its name.
        rule: decides what is saved.
        audits: computes some answers again.
        incompatible: pairs of an engine's name and the id of a handoff whose KV it cannot load, though their
            weights are equal; the oldest first.
    """

    handoffs: Handoffs
    planner: Planner
    metrics: HandoffMetrics
    settings: HandoffSettings
    modes: Mapping[str, AutomaticMode]
    rule: SaveRule
    audits: Audits
    incompatible: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict)

    def request(
        self, engine: Engine, operation: Operation, body: Json, tenant: str
    ) -> AutomaticRequest | None:
        """Return what chooses transfers for a request that names no handoff; None: nothing is automatic."""
        mode = self.modes.get(engine.name, self.settings.auto)
        if mode == "off" or not engine.supports_handoffs or operation not in OPERATIONS:
            return None
        if body.get("use_beam_search"):  # each of its steps is a request to the engine
            return None
        wish = save_wish(operation, body)
        return AutomaticRequest(
            self, engine, tenant, saves=mode == "on", conversation=operation in CONVERSATIONS, wish=wish
        )

    def find(self, engine: Engine, tenant: str, prompt: Sequence[int]) -> PrefixMatch | None:
        """Return the tenant's stored context that shares most tokens, and their images, with a prompt.

        Args:
            engine: the engine that answers.
            tenant: the owner.
            prompt: token ids, in which other images are other numbers; see `with_distinct_images`.
        """
        elsewhere: list[HandoffRecord] = []

        def usable(record: HandoffRecord) -> bool:
            if (engine.name, record.id) in self.incompatible:
                return False
            if not (here := self.handoffs.is_here(record)):
                elsewhere.append(record)
            return here

        match = self.handoffs.longest_prefix(tenant, engine.weights, prompt, usable)
        if elsewhere:  # this request does not wait for it; the next one finds it here
            self.handoffs.begin_work(self.handoffs.bring(elsewhere[0], engine))
        self.metrics.automatic_lookups.labels("found" if match is not None else "none").inc()
        return match

    def save(
        self,
        engine: Engine,
        tenant: str,
        handoff_id: str,
        transfer: TransferRequest,
        tokens: list[int],
        images: Sequence[ImagePosition],
        ttl_s: int | None,
    ) -> None:
        """Register a context that the engine saves as a handoff."""
        record = self.handoffs.begin(engine, tenant, ttl_s=ttl_s, automatic=handoff_id)
        record.positions = list(images)
        self.handoffs.end(record, transfer, tokens)
        self.rule.saved(tenant)
        self.metrics.automatic_saves.inc()

    def note_load(self, engine: Engine, match: PrefixMatch, report: TransferReport) -> None:
        """Count what a request loaded, and forget KV that could not be used."""
        if match.alone:
            self.rule.used(match.record.tenant)
        if report.miss is TransferFailure.INCOMPATIBLE:
            self._note_incompatible(engine, match.record)
        elif report.miss in KV_IS_GONE or (report.lost and match.record.automatic):
            self.handoffs.kv_gone(match.record)
        if report.loaded and not report.lost:
            self.metrics.tokens_reused.inc(report.loaded)
            self.metrics.saved_prefill.inc(engine.throughput.prefill_s(report.loaded) or 0)

    def _note_incompatible(self, engine: Engine, record: HandoffRecord) -> None:
        """Remember it in this gateway: in another one the engine of this name may have other settings."""
        self.incompatible[engine.name, record.id] = None
        if len(self.incompatible) > INCOMPATIBLE:
            self.incompatible.popitem(last=False)


@dataclass(frozen=True)
class Choice:
    """What was chosen for one prompt.

    Attributes:
        match: the stored context that the prompt shares most tokens with.
        save_id: id of the handoff that is saved; None: none.
        images: the images of the prompt, in order.
    """

    match: PrefixMatch | None
    save_id: str | None
    images: Sequence[ImagePosition]


class AutomaticRequest:
    """Chooses transfers for one request; see `baton.engines.kv_transfer.TransferChooser`.

    Args:
        automatic: the automatic handoffs of the gateway.
        engine: the engine that answers.
        tenant: the owner of the request.
        saves: whether contexts are saved that are likely to be continued.
        conversation: whether the prompt is written from messages.
        wish: the client's own wish that its context is saved.
    """

    def __init__(
        self,
        automatic: AutomaticHandoffs,
        engine: Engine,
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
        self._choices: dict[TransferRequest, Choice] = {}

    def choose(
        self, prompt: Sequence[int], images: Sequence[ImagePosition] = (), *, loads: bool, saves: bool
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
        self, prompt: Sequence[int], images: Sequence[ImagePosition], *, loads: bool, saves: bool
    ) -> TransferRequest | None:
        prompt = with_distinct_images(prompt, images)
        match = self._automatic.find(self._engine, self._tenant, prompt)
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
        if not transfer.moves_kv:
            return None
        self._choices[transfer] = Choice(match, save_id, images)
        return transfer

    def _is_worth_saving(self, prompt: Sequence[int], match: PrefixMatch | None) -> bool:
        if not self._saves and self._wish is None:
            return False
        likely = self._conversation or self._wish is not None
        return self._automatic.rule.is_worth_saving(self._tenant, prompt, match, conversation=likely)

    def _decide(self, match: PrefixMatch) -> Decision:
        decision = self._automatic.planner.decide(self._engine, match.record, match.tokens)
        self._automatic.metrics.decisions.labels(decision.choice.value).inc()
        return decision

    def ended(self, transfer: TransferRequest) -> None:
        try:
            self._end(transfer)
        except Exception as error:  # a fault of this cache must not cost an answer
            log.error("automatic_handoff_failed", exc_info=error)

    def _end(self, transfer: TransferRequest) -> None:
        choice, report = self._choices.pop(transfer), transfer.report
        stored = 0
        if choice.match is not None:
            self._automatic.note_load(self._engine, choice.match, report)
            self._automatic.audits.note(self._engine, choice.match.record, transfer)
            stored = 0 if report.miss is not None or report.lost else choice.match.tokens
        tokens = report.prompt_ids + report.output_ids
        if choice.save_id is None or not report.saves or len(tokens) - stored < transfer.least:
            return
        ttl_s = self._wish.ttl_s if self._wish is not None else None
        self._automatic.save(
            self._engine, self._tenant, choice.save_id, transfer, tokens, choice.images, ttl_s
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

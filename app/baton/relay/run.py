"""Run a planned request at its engine, and save its context."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from baton.engines.backend import Json, Operation, Reply, StreamReply, WholeReply
from baton.engines.engine import LocalEngine
from baton.engines.transfers import TransferReport, TransferRequest
from baton.errors import ShuttingDown
from baton.library.handoff import Context, Conversation, Handoff, common_tokens
from baton.library.library import Library
from baton.relay.asked import ID_HEADER, WRITTEN_BY_THE_ENGINE
from baton.relay.audit import Audits
from baton.relay.cost import Decision
from baton.relay.join import Part
from baton.relay.prompt.chat import AFTER_THE_PROMPT, ContextPrompt, conversation_of, tells_thoughts
from baton.relay.prompt.resent import answer_fingerprint
from baton.relay.report import (
    DIAGNOSTICS,
    DONE,
    KV_IS_GONE,
    apart,
    chunk_of,
    event_of,
    explained_events,
    head_of,
    prefix_hits,
    source_diagnostics,
    source_outcome,
    without_keys,
)
from baton.relay.sources import Translated, has_kv_of
from baton.telemetry.ids import RESUMED_HEADER, Cut, RequestContext
from baton.telemetry.metrics import HandoffMetrics
from baton_kv.contract import MovedPart

# Build the assistant's message from a chat's answer, whole or streamed.


class ChatAnswer:
    """Collects the one answer of a chat as a message.

    Example:
        >>> answer = ChatAnswer()
        >>> answer.add({"choices": [{"delta": {"role": "assistant", "content": "Ro"}}]})
        >>> answer.add({"choices": [{"delta": {"content": "me"}}]})
        >>> answer.message["content"]
        'Rome'
    """

    def __init__(self) -> None:
        self._seen = False
        self._content: list[str] = []
        self._calls: dict[int, Json] = {}

    def add(self, answer: Json) -> None:
        """Add a whole answer, or the next chunk of a streamed one; other objects add nothing."""
        for choice in answer.get("choices") or ():
            said = choice.get("message") or choice.get("delta")
            if isinstance(said, dict):
                self._seen = True
                content = said.get("content")
                self._content.append(content if isinstance(content, str) else "")
                for index, call in enumerate(said.get("tool_calls") or ()):
                    self._add_call(call.get("index", index), call)

    @property
    def message(self) -> Json:
        """The message so far."""
        calls = [self._calls[index] for index in sorted(self._calls)]
        return {"role": "assistant", "content": "".join(self._content), "tool_calls": calls}

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint that recognises the message when a client sends it again; None: no answer came."""
        return answer_fingerprint(self.message) if self._seen else None

    def _add_call(self, index: int, call: Json) -> None:
        known = self._calls.setdefault(index, {"id": None, "function": {"name": None, "arguments": ""}})
        known["id"] = call.get("id") or known["id"]
        function: dict[str, Any] = call.get("function") or {}
        known["function"]["name"] = function.get("name") or known["function"]["name"]
        known["function"]["arguments"] += function.get("arguments") or ""


# Run one prepared request with a handoff, and add the `handoff` object to its answer.


SETTLE_WITHIN_S = 0.25
"""An answer waits this long for its KV to be saved, so that its handoff is mostly `ready`."""


@dataclass(frozen=True)
class JoinedPart:
    """One of several handoffs that a request continues.

    Attributes:
        end: number of the prompt's tokens up to the end of its part.
        moved: what of its KV is moved to its place; None: nothing.
    """

    part: Part
    end: int
    moved: MovedPart | None = None

    def public(self, begin: int, report: TransferReport, found: int) -> Json:
        """Return where the KV of its tokens came from.

        Args:
            begin: number of the prompt's tokens before it.
            found: number of the prompt's first tokens that were loaded in place, or in the engine already.
        """
        moved = 0
        if self.moved is not None:
            moved = min(max(0, (report.loaded or 0) - self.moved.to), self.moved.tokens)
        kept = moved if self.moved is not None else min(max(0, found - begin), self.end - begin)
        translated = self.part.translated
        return (translated.public(self.part.record) if translated is not None else {}) | {
            "id": self.part.named,
            "tokens": self.end - begin,
            "loaded_tokens": 0 if self.moved is not None else max(0, min(self.end, report.in_place) - begin),
            "moved_tokens": moved,
            "recomputed_tokens": self.end - begin - kept,
        }


# Leave behind what a stream has said that a drain ends, so that its client has it go on at another gateway.


LEFT_FOR_S = 600
"""Seconds that such a handoff lives: its client comes again at once, or not at all."""
LEFT_WITHIN_S = 0.7
"""Seconds in which its record must be written: the drain does not wait longer."""


@dataclass(frozen=True)
class LeftBehind:
    """A stream that may be handed on.

    Attributes:
        body: the request's, with its `handoff` field taken out.
        cut_off: how often drains have ended its answer before.
    """

    handoffs: Library
    metrics: HandoffMetrics
    engine: LocalEngine
    context: RequestContext
    body: Json
    cut_off: int = 0

    async def events(
        self, events: AsyncIterator[str], conversation: Conversation | None = None
    ) -> AsyncIterator[str]:
        """Pass on the events of a stream.

        Args:
            conversation: what its prompt was written from; None: its messages, or it is no chat.

        Raises:
            ShuttingDown: a drain has ended it; the error says how it goes on.
        """
        cut = self.context.cut
        async with aclosing(events) as rest:  # type: ignore[type-var]  # engines hand out generators
            async for event in rest:
                if cut is None or not cut.ended:
                    yield event
                else:
                    for each in apart(event):
                        if each != DONE:
                            yield _unfinished(each)
        if cut is not None and cut.ended:
            raise ShuttingDown(fields={"handoff": await self._leave(cut, conversation)})

    async def _leave(self, cut: Cut, conversation: Conversation | None) -> Json:
        """Leave the context so far as a handoff; returns what its client is told of it."""
        counts = self.metrics.streams_handed_on
        chat = self.body.get("messages") is not None
        if chat:
            conversation = conversation or conversation_of(self.body, len(cut.prompt))
            if conversation is not None and conversation.answer_from == AFTER_THE_PROMPT:
                conversation = conversation.model_copy(update={"answer_from": len(cut.prompt)})
        why = cut.why or (self._hindrance(conversation) if chat else None)
        if why is not None:
            counts.labels("inexact").inc()
            return {"id": None, "reason": why}
        transfer = TransferRequest()
        transfer.report.saves = False  # of its tokens, KV is computed again
        record = self.handoffs.begin(self.engine, self.context.tenant, ttl_s=LEFT_FOR_S)
        found = Context(conversation, exact=True, cut_off=self.cut_off + 1)
        self.handoffs.end(record, transfer, [*cut.prompt, *cut.said], found)
        await self.handoffs.settled(record, LEFT_WITHIN_S)
        if not record.on_disk:
            counts.labels("not_kept").inc()
            return {"id": None, "reason": "it could not be written to the store"}
        counts.labels("left").inc()
        said = {"said_tokens": len(cut.said), "said_characters": len(cut.text)}
        return {"id": record.id, "expires_at": int(record.expires_at)} | said

    def _hindrance(self, conversation: Conversation | None) -> str | None:
        """Return why a chat that was received as messages cannot go on as its tokens do; None: it can."""
        if conversation is None or conversation.text_only:
            return "its messages are too large to keep"
        template = conversation.template | self.body
        if template.get("tools") and template.get("tool_choice") != "none":
            return "a call of a tool may have begun"
        if tells_thoughts(self.engine):
            return "thoughts are told apart from words"
        if self.body.get("continue_final_message") or self.body.get("add_generation_prompt") is False:
            return "its answer began in a message"
        return None


def _unfinished(event: str) -> str:
    """Take the reason for which an answer ended out of its last chunk: it did not."""
    chunk, text = chunk_of(event)
    choices = [each for each in chunk.get("choices") or () if each.get("finish_reason") is not None]
    for choice in choices:
        choice["finish_reason"] = None
    return event_of(chunk) if choices else text


@dataclass(frozen=True, eq=False)
class PlannedRequest:
    """One planned request with a handoff. `Plans` creates it; call `run` or `compute` once.

    Attributes:
        metrics: where handoffs are counted.
        audits: computes some answers again.
        transfer: the KV that the engine is to load and save, and its report.
        decision: whether the source's KV is loaded.
        translated: how the source came from a handoff of other weights; None: it is of the engine's.
        parts: the handoffs that were joined, the source first; empty: none were.
        thought: `handoff.source` of a request that starts from one vector; None: it starts from none.
        owns_target: whether the handoff fails with the request; otherwise who registered it may try again.
    """

    handoffs: Library
    metrics: HandoffMetrics
    audits: Audits
    engine: LocalEngine
    context: RequestContext
    prompt: ContextPrompt
    transfer: TransferRequest
    source: Handoff | None
    decision: Decision | None
    target: Handoff | None
    translated: Translated | None = None
    parts: Sequence[JoinedPart] = ()
    thought: Json | None = None
    owns_target: bool = True

    async def run(self, operation: Operation, body: Json) -> Reply:
        """Call the engine; returns its reply with the `handoff` object.

        Raises:
            BatonError: the engine failed; the handoff to be saved is marked as failed.
        """
        try:
            reply = await self.engine.call(operation, body, self.context, self.transfer)
        except BaseException:
            self.fail()
            raise
        headers = {ID_HEADER: self.target.id} if self.target is not None else {}
        if self._goes_on and self.source is not None:
            headers[RESUMED_HEADER] = str(self.source.cut_off)
        if isinstance(reply, StreamReply):
            if operation not in WRITTEN_BY_THE_ENGINE:
                return StreamReply(self._stream(self._leaving(reply.events, body)), headers)
            events = explained_events(reply.events, operation, self.diagnostics)
            return StreamReply(self._follow(events), headers)
        return await self._whole(reply, headers)

    async def compute(self, prompt: str | list[int]) -> Json:
        """Have the engine compute the context without an answer; returns the `handoff` object.

        Args:
            prompt: the client's prompt, for a context that the engine tokenizes itself.

        Raises:
            BatonError: the engine failed; the handoff to be saved is marked as failed if the request owns it.
        """
        body = {"model": self.engine.name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        try:
            reply = await self.engine.call(Operation.COMPLETIONS, body, self.context, self.transfer)
            assert isinstance(reply, WholeReply)
        except BaseException:
            self.fail()
            raise
        return await self._finish(ChatAnswer())

    @property
    def _goes_on(self) -> bool:
        """True if the request goes on with an answer that a drain ended."""
        source, tokens = self.source, self.prompt.tokens
        return source is not None and bool(source.cut_off) and len(tokens or ()) == len(source.tokens)

    def _leaving(self, events: AsyncIterator[str], body: Json) -> AsyncIterator[str]:
        cut_off = self.source.cut_off if self._goes_on and self.source is not None else 0
        left = LeftBehind(self.handoffs, self.metrics, self.engine, self.context, body, cut_off)
        return left.events(events, self.prompt.conversation)

    def fail(self) -> None:
        """Mark the handoff to be saved as failed, unless the request has ended already."""
        if self.target is not None and self.owns_target:
            self.handoffs.end(self.target, None)

    async def _whole(self, reply: WholeReply, headers: dict[str, str]) -> WholeReply:
        body, answer = json.loads(reply.body), ChatAnswer()
        without_keys(body)
        answer.add(body)
        body["handoff"] = await self._finish(answer)
        if (found := self.diagnostics()) is not None:
            body[DIAGNOSTICS] = found
        return WholeReply(json.dumps(body).encode(), reply.media_type, dict(reply.headers) | headers)

    async def _stream(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """Pass the events on, with a chunk that holds the `handoff` object before the last one."""
        ended, answer = False, ChatAnswer()
        last: Json = {}
        try:
            async with aclosing(events) as rest:  # type: ignore[type-var]  # engines hand out generators
                async for event in rest:
                    if event == DONE:
                        ended = True
                        more: Json = {"choices": [], "handoff": await self._finish(answer)}
                        if (found := self.diagnostics()) is not None:
                            more[DIAGNOSTICS] = found
                        yield event_of(head_of(last) | more)
                        yield event
                        continue
                    last, text = chunk_of(event)
                    if self.target is not None:
                        answer.add(last)
                    yield text
        finally:
            if not ended:
                self.fail()

    async def _follow(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """Pass on the events of an API that has no room for the `handoff` object, and save at their end."""
        ended = False
        try:
            async with aclosing(events) as rest:  # type: ignore[type-var]  # engines hand out generators
                async for event in rest:
                    yield event
            ended = True
            await self._finish(ChatAnswer())
        finally:
            if not ended:
                self.fail()

    async def _finish(self, answer: ChatAnswer) -> Json:
        """Save the context if that was asked for; returns the `handoff` object."""
        shown: Json = {}
        if self.target is not None:
            shown = await self._save(self.target, answer)
        if self.source is not None:
            shown["source"] = self._describe(self.source)
        elif self.thought is not None:
            shown["source"] = self.thought
            self.metrics.consumed.labels(self.thought["outcome"]).inc()
        return shown

    async def _save(self, target: Handoff, answer: ChatAnswer) -> Json:
        report, transfer = self.transfer.report, self.transfer
        tokens = report.prompt_ids[: self.prompt.saved_tokens]
        if not transfer.prompt_only:
            if report.answer_ids is None:  # another context than the client's own is none
                self.handoffs.end(target, None)
                return target.public()
            tokens = tokens + report.answer_ids
        context = Context(
            self._conversation(answer),
            exact=transfer.salt is None,  # as the connector marks its entry
            positions=() if transfer.images else report.images,  # without their pixels
            latent_steps=transfer.latent_steps,
            placeholder=self.engine.placeholder if transfer.latent_steps else None,
        )
        self.handoffs.end(target, transfer, tokens, context)
        await self.handoffs.settled(target, SETTLE_WITHIN_S)
        self.metrics.created.inc()
        return target.public()

    def _conversation(self, answer: ChatAnswer) -> Conversation | None:
        """Return the conversation, now that it is known where the answer begins."""
        conversation, report = self.prompt.conversation, self.transfer.report
        if conversation is None or conversation.answer_from is None:
            return conversation
        if AFTER_THE_PROMPT < conversation.answer_from < len(report.prompt_ids):
            return conversation  # the answer began in what was continued, or is of joined contexts' last one
        answered = not self.transfer.prompt_only
        known: Json = {}
        if conversation.answer_from == AFTER_THE_PROMPT:
            known["answer_from"] = len(report.prompt_ids)
        if (fingerprint := answer.fingerprint) is not None and answered:
            known["answer_fingerprints"] = conversation.answer_fingerprints | {
                len(conversation.messages): fingerprint
            }
        return conversation.model_copy(update=known)

    @property
    def computed(self) -> int:
        """Number of the prompt's tokens that were computed."""
        report = self.transfer.report
        return len(report.prompt_ids) - prefix_hits(report) + report.computed

    @property
    def exact(self) -> bool:
        """True if the KV that the answer started from is what the engine would compute of its tokens.

        Where it might not be, the prefix cache is the request's own, so that its loads alone decide.
        """
        report = self.transfer.report
        inexact = self.source is not None and not self.source.exact and report.loaded is not None
        return not inexact and not report.moved

    def _parts(self) -> list[Json]:
        """Return where the KV of each of several handoffs came from."""
        report, begins = self.transfer.report, [0, *(part.end for part in self.parts)]
        found = prefix_hits(report) if self.transfer.salt is None else report.in_place
        return [part.public(begin, report, found) for begin, part in zip(begins, self.parts, strict=False)]

    def _forget_lost_parts(self) -> None:
        """Note of the parts that were to be moved which have no KV any more."""
        lost = self.transfer.report.lost_entries
        for each in self.parts:
            if each.moved is not None and lost.get(each.moved.key) in KV_IS_GONE:
                self.handoffs.kv_gone(each.part.record)

    def _note_uses(self, source: Handoff, shown: Json) -> None:
        """Note of every handoff that the request started from that it did."""
        outcome, reason = shown["outcome"], shown["reason"]
        loaded, resident = shown["loaded_tokens"], shown["resident_tokens"]
        named = self.translated.source if self.translated is not None else source
        self.handoffs.note_use(named, outcome, reason, loaded=loaded, resident=resident)
        for each, part in zip(self.parts[1:], shown.get("parts", ())[1:], strict=True):
            found = part["loaded_tokens"] + part["moved_tokens"]
            how = "blended" if part["moved_tokens"] else "loaded" if found else "recomputed"
            other = each.part.translated
            record = each.part.record if other is None else other.source
            self.handoffs.note_use(record, how, None, loaded=found, resident=0)

    def diagnostics(self) -> Json | None:
        """Return why nothing of its source was reused, or that something was; None: it has no source."""
        if self.source is None:
            return None
        return source_diagnostics(self._outcome(self.source), len(self.transfer.report.prompt_ids))

    def _outcome(self, source: Handoff) -> Json:
        """Return the part of `handoff.source` that says what became of the source's KV."""
        report = self.transfer.report
        shown = source_outcome(source, report, self.decision) | {"exact": self.exact}
        if shown["reason"] is not None and not has_kv_of(source, self.engine):
            shown["reason"] = "other_adapter"
        if not self.exact:
            shown |= {"outcome": "blended", "reason": None}
        if self.translated is not None:
            shown |= self.translated.public(source)
            if self.translated.computed and self.exact:
                shown |= {"outcome": "translated", "reason": None}
        shown["shared_tokens"] = common_tokens(source.distinct_tokens, report.distinct_prompt)
        return shown

    def _describe(self, source: Handoff) -> Json:
        """Return `handoff.source`, and count it in the metrics."""
        report, metrics = self.transfer.report, self.metrics
        shown = self._outcome(source)
        shown["resent_messages"] = self.prompt.resent
        if self.parts:
            shown["parts"] = self._parts()
        if report.miss in KV_IS_GONE:
            self.handoffs.kv_gone(source)
        self._forget_lost_parts()
        self.audits.note(self.engine, source, self.transfer)
        reused = shown["loaded_tokens"] + shown["resident_tokens"]
        saved = self.engine.throughput.prefill_s(reused, source.steps_within(reused))
        shown["saved_prefill_ms"] = None if saved is None else round(saved * 1000, 1)
        metrics.consumed.labels(shown["outcome"]).inc()
        if self._goes_on:
            metrics.streams_handed_on.labels("went_on").inc()
        self._note_uses(source, shown)
        metrics.tokens_reused.inc(shown["loaded_tokens"])
        metrics.saved_prefill.inc(saved or 0)
        return shown

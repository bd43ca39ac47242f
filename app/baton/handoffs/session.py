"""One request with a handoff, from its plan to the `handoff` object of its answer.

`Sessions.open` does everything that may be refused: it writes the prompt, decides what to load, and registers
the handoff that will be saved. The session it returns has one thing left to do, `run`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from baton.config.groups import HandoffSettings
from baton.engines.port import (
    Engine,
    Json,
    Operation,
    PlacedImage,
    Reply,
    StreamReply,
    TransferRequest,
    WholeReply,
)
from baton.errors import InvalidRequest
from baton.handoffs.answers import ChatAnswer
from baton.handoffs.conversation import AFTER_THE_PROMPT, Writer
from baton.handoffs.options import HandoffOptions, NewHandoff, SaveOptions
from baton.handoffs.outcome import KV_IS_GONE, source_outcome
from baton.handoffs.planner import Decision, Planner
from baton.handoffs.prompt import ContextPrompt, write_prompt
from baton.handoffs.record import Conversation, HandoffRecord
from baton.handoffs.replies import DONE, chunk_of, correct_reply, event_of, head_of
from baton.handoffs.service import Handoffs
from baton.images.client_image import ClientImage
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import HandoffMetrics

SETTLE_WITHIN_S = 0.25
"""An answer waits this long for its KV to be saved, so that it can mostly say `ready`."""
LATENT_STEPS_PER_CONTEXT = 512
"""Latent steps, or what one request may ask for: lost KV is computed in one step of the engine."""
ID_HEADER = "X-Handoff-Id"
"""Names the handoff that an answer saves, for clients that drop fields they do not know."""


@dataclass(frozen=True)
class Ask:
    """What a request wants of handoffs.

    Attributes:
        operation: what the engine is asked.
        body: of the request.
        source: the handoff it starts from.
        save: how its context is saved; None: it is not.
        latent_steps: how many follow the prompt.
        answered: an answer follows the prompt; else the context ends with the last message.
    """

    operation: Operation
    body: Json
    source: HandoffRecord | None
    save: SaveOptions | None
    latent_steps: int
    answered: bool = True

    @property
    def prompt_only(self) -> bool:
        """Whether the saved context ends before the answer."""
        return self.save is not None and self.save.scope == "prompt"

    @property
    def steps_of_context(self) -> int:
        """How many latent steps the context holds, those of its source too."""
        return self.latent_steps + (self.source.latent_steps if self.source is not None else 0)


@dataclass(frozen=True)
class Sessions:
    """Opens sessions. One gateway has one.

    Attributes:
        handoffs: all handoffs.
        planner: decides whether KV is loaded or computed again.
        metrics: where handoffs are counted.
        settings: limits of handoffs.
    """

    handoffs: Handoffs
    planner: Planner
    metrics: HandoffMetrics
    settings: HandoffSettings

    async def open(
        self,
        engine: Engine,
        operation: Operation,
        body: Json,
        context: RequestContext,
        options: HandoffOptions,
        source: HandoffRecord | None,
        images: Sequence[ClientImage] = (),
    ) -> Session:
        """Plan a completion or a chat with a `handoff` field.

        Args:
            engine: does the work.
            operation: what it is asked.
            body: of the request; it holds the images too.
            context: who asks.
            options: the `handoff` field.
            source: the handoff it starts from.
            images: of the request, in the order of its prompt.

        Raises:
            BatonError: the request cannot be done with this handoff; nothing was registered.
        """
        ask = Ask(operation, body, source, options.saving, options.latent_steps)
        if ask.steps_of_context and body.get("prompt_logprobs") is not None:
            raise InvalidRequest("'prompt_logprobs' does not go with latent steps.", param="prompt_logprobs")
        return await self._plan(engine, context, ask, images)

    async def open_new(
        self,
        engine: Engine,
        body: Json,
        context: RequestContext,
        options: NewHandoff,
        source: HandoffRecord | None,
        images: Sequence[ClientImage] = (),
    ) -> Session:
        """Plan `POST /v1/handoffs`: a context that is computed and saved, without an answer.

        The arguments are those of `open`.

        Raises:
            BatonError: the context cannot be computed; nothing was registered.
        """
        operation = Operation.COMPLETIONS if options.messages is None else Operation.CHAT
        save = SaveOptions(ttl_s=options.ttl_s, pin=options.pin, label=options.label, scope="prompt")
        ask = Ask(
            operation, body, source, save, options.latent_steps, answered=operation is not Operation.CHAT
        )
        return await self._plan(engine, context, ask, images)

    async def _plan(
        self, engine: Engine, context: RequestContext, ask: Ask, images: Sequence[ClientImage]
    ) -> Session:
        source = ask.source
        seen = await self.handoffs.images(source) if source is not None else []
        writer = Writer(engine, context, images)
        prompt = await write_prompt(
            writer,
            source,
            seen,
            ask.operation,
            ask.body,
            prompt_only=ask.prompt_only,
            latent=bool(ask.latent_steps),
            answered=ask.answered,
        )
        _require_few_images(engine, prompt.images)
        if ask.latent_steps:
            self._require_few_steps(ask.steps_of_context)
            prompt = prompt.with_latent_steps(ask.latent_steps, engine.placeholder)
        if ask.save is not None:
            self._require_light_images(prompt.images)
        decision = self._decide(engine, source)
        target = self._register(engine, context, ask)
        transfer = TransferRequest(
            prompt.tokens,
            prompt.images,
            save=target.key if target is not None else None,
            prompt_only=ask.prompt_only,
            load=source.key if source is not None and decision is not None and decision.loads else None,
            limit=decision.limit if decision is not None and decision.loads else None,
            latent_steps=ask.steps_of_context,
        )
        return Session(self, engine, context, prompt, transfer, source, decision, target)

    def _decide(self, engine: Engine, source: HandoffRecord | None) -> Decision | None:
        if source is None:
            return None
        decision = self.planner.decide(engine, source)
        self.metrics.decisions.labels(decision.choice.value).inc()
        return decision

    def _register(self, engine: Engine, context: RequestContext, ask: Ask) -> HandoffRecord | None:
        if ask.save is None:
            return None
        return self.handoffs.begin(
            engine,
            context.tenant,
            parent=ask.source.id if ask.source is not None else None,
            label=ask.save.label,
            ttl_s=ask.save.ttl_s,
            pin=ask.save.pin,
        )

    def _require_few_steps(self, steps: int) -> None:
        most = max(LATENT_STEPS_PER_CONTEXT, self.settings.latent_steps_max)
        if steps > most:
            raise InvalidRequest(
                f"The context would hold {steps} latent steps with those of the handoff it "
                f"starts from, and at most {most} are allowed.",
                param="latent_steps",
            )

    def _require_light_images(self, images: Sequence[PlacedImage]) -> None:
        """Refuse images that a handoff may not keep, before the engine hears of them."""
        most = self.settings.image_bytes
        size = sum({image.digest: len(image.image.data) for image in images}.values())
        if size > most:
            raise InvalidRequest(
                f"The context's images take {size} bytes, and a handoff keeps at most {most} "
                "(setting handoffs.image_bytes): send smaller ones, or do not save.",
                param="messages",
            )


def _require_few_images(engine: Engine, images: Sequence[PlacedImage]) -> None:
    """Count the images of the handoff with the request's own."""
    found, most = len(images), engine.images.limit
    if found > most:
        raise InvalidRequest(
            f"The context holds {found} images with those of its handoff; the model '{engine.name}' "
            f"takes at most {most}.",
            param="messages",
        )


@dataclass(frozen=True, eq=False)
class Session:
    """One planned request with a handoff. `Sessions` makes it; call `run` or `compute` once.

    Attributes:
        sessions: what it was opened with.
        engine: does the work.
        context: who asks.
        prompt: its whole prompt.
        transfer: what the engine is asked to load and save, and its report.
        source: the handoff it starts from.
        decision: what the planner decided about the source.
        target: the handoff that it saves.
    """

    sessions: Sessions
    engine: Engine
    context: RequestContext
    prompt: ContextPrompt
    transfer: TransferRequest
    source: HandoffRecord | None
    decision: Decision | None
    target: HandoffRecord | None

    async def run(self, operation: Operation, body: Json) -> Reply:
        """Let the engine work; the reply has the `handoff` object.

        Raises:
            BatonError: the engine failed; the handoff that was to be saved has failed too.
        """
        try:
            reply = await self.engine.call(operation, body, self.context, self.transfer)
        except BaseException:
            self.fail()
            raise
        headers = {ID_HEADER: self.target.id} if self.target is not None else {}
        if isinstance(reply, StreamReply):
            return StreamReply(self._stream(reply.events), headers)
        return await self._whole(reply, headers)

    async def compute(self, prompt: str | list[int]) -> Json:
        """Let the engine compute the context, without an answer; returns the `handoff` object.

        Args:
            prompt: the client's own, for a context that is nothing else.

        Raises:
            BatonError: the engine failed; the handoff that was to be saved has failed too.
        """
        body = {"model": self.engine.name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        try:
            await self.engine.call(Operation.COMPLETIONS, body, self.context, self.transfer)
        except BaseException:
            self.fail()
            raise
        return await self._finish(ChatAnswer())

    def fail(self) -> None:
        """Mark the handoff that was to be saved as failed, unless the request has come to its end."""
        if self.target is not None:
            self.sessions.handoffs.end(self.target, None)

    async def _whole(self, reply: WholeReply, headers: dict[str, str]) -> WholeReply:
        body, answer = json.loads(reply.body), ChatAnswer()
        correct_reply(body, self.transfer.report)
        answer.add(body)
        body["handoff"] = await self._finish(answer)
        return WholeReply(json.dumps(body).encode(), reply.media_type, dict(reply.headers) | headers)

    async def _stream(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """Pass the events on, and before the last one a chunk with the `handoff` object."""
        ended, answer = False, ChatAnswer()
        last: Json = {}
        try:
            async with aclosing(events) as rest:  # type: ignore[type-var]  # engines hand out generators
                async for event in rest:
                    if event == DONE:
                        ended = True
                        yield event_of(head_of(last) | {"choices": [], "handoff": await self._finish(answer)})
                        yield event
                        continue
                    last, text = chunk_of(event, self.transfer.report)
                    if self.target is not None:
                        answer.add(last)
                    yield text
        finally:
            if not ended:
                self.fail()

    async def _finish(self, answer: ChatAnswer) -> Json:
        """Hand the context to what saves it; returns the `handoff` object."""
        shown: Json = {}
        if self.target is not None:
            shown = await self._save(self.target, answer)
        if self.source is not None:
            shown["source"] = self._describe(self.source)
        return shown

    async def _save(self, target: HandoffRecord, answer: ChatAnswer) -> Json:
        report, transfer = self.transfer.report, self.transfer
        tokens = report.prompt_ids[: self.prompt.rests_at]
        if not transfer.prompt_only:
            tokens = tokens + report.output_ids
        target.conversation = self._conversation(answer)
        if transfer.latent_steps:
            target.latent_steps, target.placeholder = transfer.latent_steps, self.engine.placeholder
        handoffs = self.sessions.handoffs
        handoffs.end(target, transfer, tokens)
        await handoffs.settled(target, SETTLE_WITHIN_S)
        self.sessions.metrics.created.inc()
        return target.public()

    def _conversation(self, answer: ChatAnswer) -> Conversation | None:
        """Return the messages, now that it is known where the answer begins and how it ended."""
        conversation, report = self.prompt.conversation, self.transfer.report
        if conversation is None or conversation.answer_from is None:
            return conversation
        answered = not self.transfer.prompt_only
        known: Json = {"ended": report.ended_by_token and answered}
        if conversation.answer_from == AFTER_THE_PROMPT:
            known["answer_from"] = len(report.prompt_ids)
        if (fingerprint := answer.fingerprint) is not None and answered:
            known["told"] = conversation.told | {len(conversation.messages): fingerprint}
        return conversation.model_copy(update=known)

    def _describe(self, source: HandoffRecord) -> Json:
        """Return `handoff.source`, and count it."""
        report, metrics = self.transfer.report, self.sessions.metrics
        shown = source_outcome(source, report, self.decision)
        shown["resent_messages"] = self.prompt.resent
        if report.miss in KV_IS_GONE:
            source.bytes = 0
        reused = shown["loaded_tokens"] + shown["resident_tokens"]
        saved = self.engine.throughput.prefill_s(reused, source.steps_within(reused))
        shown["saved_prefill_ms"] = None if saved is None else round(saved * 1000, 1)
        metrics.consumed.labels(shown["outcome"]).inc()
        metrics.tokens_reused.inc(shown["loaded_tokens"])
        metrics.saved_prefill.inc(saved or 0)
        return shown

"""One request's leg of a relay: it starts from what another left behind, leaves something behind, or both."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from baton.engines.port import Engine, Json, Operation, Placed, Relay, Reply, StreamReply, WholeReply
from baton.errors import InvalidRequest
from baton.handoffs.answers import ChatAnswer
from baton.handoffs.conversation import AFTER_THE_PROMPT, Chat, Writer, conversation_of, with_text
from baton.handoffs.options import HandoffWish, NewHandoff
from baton.handoffs.planner import Choice, Decision
from baton.handoffs.record import Conversation, HandoffRecord
from baton.http.state import Gateway
from baton.images.picture import Picture
from baton.telemetry.ids import RequestContext
from baton_latent.contract import prepare_latent_prompt

SETTLE_WITHIN_S = 0.25
"""An answer waits this long for its KV to be saved, so that it can mostly say `ready`."""
STEPS_OF_A_CONTEXT = 512
"""Latent steps, or what one request may ask for: where KV is lost one step of the engine thinks them all."""
DONE = "data: [DONE]\n\n"
GONE = ("missing", "corrupt")
MISSES = {
    "missing": "kv_gone",
    "corrupt": "kv_corrupt",
    "incompatible": "kv_incompatible",
    "device": "store_unreadable",
}
"""Why an entry was not used, in the engine's words and in the answer's."""
ID_HEADER = "X-Handoff-Id"
"""Names what an answer leaves behind, for clients that drop fields they do not know."""


@dataclass
class Leg:
    """One request's part in a relay: where it starts and what it leaves.

    Attributes:
        gateway: whose handoffs they are.
        engine: who does the work.
        relay: what the engine is told, and what it tells.
        source: where it starts.
        target: what it leaves.
        decision: what the planner made of the source.
        conversation: the messages of its context, if it is a chat.
        rests_at: where its context ends when only the prompt is left behind; None: at its own end.
        seen: the images of the context it starts from.
        resent: how many messages of the request were the source's own, and were not written again.
        answer: what the client is given, if it is a chat's answer.
    """

    gateway: Gateway
    engine: Engine
    relay: Relay
    source: HandoffRecord | None = None
    target: HandoffRecord | None = None
    decision: Decision | None = None
    conversation: Conversation | None = None
    rests_at: int | None = None
    seen: list[Placed] = field(default_factory=list)
    resent: int = 0
    answer: ChatAnswer = field(default_factory=ChatAnswer)

    def write(self, chat: Chat) -> None:
        """Make a chat the prompt."""
        self.relay.prompt, self.relay.images = chat.tokens, chat.images
        self.conversation, self.resent = chat.conversation, chat.resent

    def start_from(self, source: HandoffRecord) -> None:
        """Start from a handoff, as the planner thinks best."""
        self.source = source
        self.decision = self.gateway.planner.decide(self.engine, source)
        self.gateway.metrics.handoffs.decisions.labels(self.decision.choice.value).inc()
        if self.decision.loads:
            self.relay.load, self.relay.limit = source.key, self.decision.limit

    def think(self, source: HandoffRecord | None, steps: int) -> None:
        """Think so many steps after the prompt, beside those of the handoff it starts from.

        Raises:
            InvalidRequest: there is nothing to think about, or the context would hold too many.
        """
        self.relay.latent_steps = steps + (source.latent_steps if source is not None else 0)
        if not steps:
            return
        most = max(STEPS_OF_A_CONTEXT, self.gateway.settings.handoffs.latent_steps_max)
        if self.relay.latent_steps > most:
            raise InvalidRequest(
                f"The context would hold {self.relay.latent_steps} latent steps with those of the handoff it "
                f"starts from, and at most {most} are allowed.",
                param="latent_steps",
            )
        prompt, placeholder = self.relay.prompt, self.engine.placeholder
        assert placeholder is not None  # see `require_latent`
        if not prompt:
            raise InvalidRequest("Latent steps follow a prompt of at least one token.", param="prompt")
        self.relay.prompt = prepare_latent_prompt(prompt, steps, placeholder)
        if self.conversation is not None and self.conversation.answer_from == len(prompt):
            self.conversation = self.conversation.model_copy(update={"answer_from": len(prompt) + steps})

    def leave(self, target: HandoffRecord, *, prompt_only: bool) -> None:
        """Leave a handoff behind."""
        self.target = target
        self.relay.save, self.relay.prompt_only = target.key, prompt_only

    def gave(self, answer: Json) -> None:
        """Remember what the client is given, an answer or a chunk of it, where a handoff is left behind."""
        if self.target is not None:
            self.answer.add(answer)

    def failed(self) -> None:
        """The request came to a bad end: there is nothing to start from."""
        if self.target is not None:
            self.gateway.handoffs.end(self.target, None)

    async def ended(self) -> Json:
        """The request is over: the `handoff` object of its answer."""
        told: Json = {}
        if self.target is not None:
            told = await self._left(self.target)
        if self.source is not None:
            told["source"] = self._came_from(self.source)
        return told

    async def _left(self, target: HandoffRecord) -> Json:
        tokens = self.relay.prompt_ids[: self.rests_at]
        if not self.relay.prompt_only:
            tokens = tokens + self.relay.output_ids
        target.conversation = self._conversation_now()
        if self.relay.latent_steps:
            target.latent_steps, target.placeholder = self.relay.latent_steps, self.engine.placeholder
        handoffs = self.gateway.handoffs
        handoffs.end(target, self.relay, tokens)
        await handoffs.settled(target, SETTLE_WITHIN_S)
        self.gateway.metrics.handoffs.created.inc()
        return target.public()

    def _conversation_now(self) -> Conversation | None:
        """The messages, now that it is known where the answer begins and how it ended."""
        conversation = self.conversation
        if conversation is None or conversation.answer_from is None:
            return conversation
        known: Json = {"ended": self.relay.ended_by_token and not self.relay.prompt_only}
        if conversation.answer_from == AFTER_THE_PROMPT:
            known["answer_from"] = len(self.relay.prompt_ids)
        if (told := self.answer.fingerprint) is not None and not self.relay.prompt_only:
            known["told"] = conversation.told | {len(conversation.messages): told}
        return conversation.model_copy(update=known)

    def _came_from(self, source: HandoffRecord) -> Json:
        told = outcome(source, self.relay, self.decision) | {"resent_messages": self.resent}
        if self.relay.miss in GONE:
            source.bytes = 0
        reused = told["loaded_tokens"] + told["resident_tokens"]
        saved = self.engine.speed.prefill_s(reused, source.steps_within(reused))
        told["saved_prefill_ms"] = None if saved is None else round(saved * 1000, 1)
        counted = self.gateway.metrics.handoffs
        counted.consumed.labels(told["outcome"]).inc()
        counted.tokens_reused.inc(told["loaded_tokens"])
        counted.saved_prefill.inc(saved or 0)
        return told


async def relayed(
    gateway: Gateway,
    engine: Engine,
    operation: Operation,
    body: Json,
    context: RequestContext,
    wish: HandoffWish,
    source: HandoffRecord | None,
    pictures: Sequence[Picture] = (),
) -> Reply:
    """Do a request that is part of a relay, and starts from `source`.

    `pictures` are the images of `body`, which holds them too, in the order of its own prompt.

    Its prompt is always the whole truth: the handoff's token ids and then its own. The entry only
    brings KV for what both share.
    """
    handoffs = gateway.handoffs
    leg = Leg(gateway, engine, Relay(), seen=await handoffs.images(source) if source is not None else [])
    steps = wish.latent_steps
    writer = Writer(engine, context, pictures)
    await _write_prompt(
        leg, source, operation, body, writer, prompt_only=_prompt_only(wish), thinks=bool(steps)
    )
    _refuse_many_images(leg)
    leg.think(source, steps)
    _refuse_logprobs_of_thoughts(leg, body)
    if source is not None:
        leg.start_from(source)
    if (save := wish.saving) is not None:
        _refuse_heavy_images(leg)
        target = handoffs.begin(
            engine, context.tenant, parent=wish.source, label=save.label, ttl_s=save.ttl_s, pin=save.pin
        )
        leg.leave(target, prompt_only=_prompt_only(wish))
    try:
        reply = await engine.call(operation, body, context, leg.relay)
    except BaseException:
        leg.failed()
        raise
    headers = {ID_HEADER: leg.target.id} if leg.target is not None else {}
    if isinstance(reply, StreamReply):
        return StreamReply(_stream(leg, reply.events), headers)
    return await _whole(leg, reply, headers)


async def computed(
    gateway: Gateway,
    engine: Engine,
    wish: NewHandoff,
    body: Json,
    context: RequestContext,
    source: HandoffRecord | None,
    pictures: Sequence[Picture] = (),
) -> tuple[Leg, Json]:
    """A leg that only computes a context and leaves it behind, and the body that does it."""
    seen = await gateway.handoffs.images(source) if source is not None else []
    leg = Leg(gateway, engine, Relay(), seen=seen)
    writer = Writer(engine, context, pictures)
    if wish.messages is not None:
        leg.write(await _chat(leg, writer, source, body, answered=False))
    else:
        await _write_prompt(
            leg,
            source,
            Operation.COMPLETIONS,
            body,
            writer,
            prompt_only=True,
            thinks=bool(wish.latent_steps),
        )
    _refuse_many_images(leg)
    leg.think(source, wish.latent_steps)
    if source is not None:
        leg.start_from(source)
    _refuse_heavy_images(leg)
    target = gateway.handoffs.begin(
        engine, context.tenant, parent=wish.source, label=wish.label, ttl_s=wish.ttl_s, pin=wish.pin
    )
    leg.leave(target, prompt_only=True)
    own = {"model": engine.name, "prompt": wish.prompt or "", "max_tokens": 1, "temperature": 0}
    return leg, own


def _refuse_logprobs_of_thoughts(leg: Leg, body: Json) -> None:
    """A step is no word of the vocabulary, and has no probability."""
    if leg.relay.latent_steps and body.get("prompt_logprobs") is not None:
        raise InvalidRequest("'prompt_logprobs' does not go with latent steps.", param="prompt_logprobs")


def _refuse_many_images(leg: Leg) -> None:
    """Those of the handoff count with the request's own."""
    found, most = len(leg.relay.images), leg.engine.images.limit
    if found > most:
        raise InvalidRequest(
            f"The context holds {found} images with those of its handoff; the model '{leg.engine.name}' "
            f"takes at most {most}.",
            param="messages",
        )


def _refuse_heavy_images(leg: Leg) -> None:
    """What a handoff keeps of images is bounded; of one that is too heavy the engine never hears."""
    most = leg.gateway.settings.handoffs.image_bytes
    weight = sum({image.digest: len(image.picture.data) for image in leg.relay.images}.values())
    if weight > most:
        raise InvalidRequest(
            f"The context's images take {weight} bytes, and a handoff keeps at most {most} "
            "(setting handoffs.image_bytes): send smaller ones, or do not save.",
            param="messages",
        )


def _prompt_only(wish: HandoffWish) -> bool:
    return wish.saving is not None and wish.saving.scope == "prompt"


async def _write_prompt(
    leg: Leg,
    source: HandoffRecord | None,
    operation: Operation,
    body: Json,
    writer: Writer,
    *,
    prompt_only: bool,
    thinks: bool,
) -> None:
    """Set the leg's whole prompt, where the body alone does not say it, and what it is as a conversation."""
    if operation is Operation.COMPLETIONS:
        prompt = body.get("prompt") or ""
        if source is None and (thinks or writer.pictures):
            special = body.get("add_special_tokens") is not False
            leg.relay.prompt, leg.relay.images = await writer.plain(prompt, special=special)
        if source is not None:
            own, images = await writer.plain(prompt, special=False, after=len(source.tokens))
            leg.relay.prompt, leg.conversation = [*source.tokens, *own], with_text(source.conversation)
            leg.relay.images = [*leg.seen, *images]
        return
    if source is None and not (
        prompt_only or thinks or writer.pictures
    ):  # the engine writes it, as every other chat
        leg.conversation = conversation_of(body, AFTER_THE_PROMPT)
        return
    chat = await _chat(leg, writer, source, body, answered=True)
    leg.write(chat)
    if prompt_only and not thinks:  # thoughts come after the prompt, where the answer begins
        resting = await _chat(leg, writer, source, body, answered=False)
        if chat.tokens[: len(resting.tokens)] == resting.tokens:
            leg.rests_at, leg.conversation = len(resting.tokens), resting.conversation


async def _chat(
    leg: Leg, writer: Writer, source: HandoffRecord | None, body: Json, *, answered: bool
) -> Chat:
    if source is None:
        return await writer.begun(body, answered=answered)
    return await writer.continued(source, leg.seen, body, answered=answered)


async def _whole(leg: Leg, reply: WholeReply, headers: dict[str, str]) -> WholeReply:
    answer = json.loads(reply.body)
    _forget_transfer(answer)
    _true_usage(answer.get("usage"), leg.relay)
    leg.gave(answer)
    answer["handoff"] = await leg.ended()
    return WholeReply(json.dumps(answer).encode(), reply.media_type, dict(reply.headers) | headers)


async def _stream(leg: Leg, events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events, and before the last one a chunk of ours that tells of the handoff."""
    ended = False
    last: Json = {}
    try:
        async with aclosing(events) as rest:  # type: ignore[type-var]  # engines hand out generators
            async for event in rest:
                if event == DONE:
                    ended = True
                    yield _event(_head(last) | {"choices": [], "handoff": await leg.ended()})
                    yield event
                    continue
                last, text = _seen(event, leg.relay)
                leg.gave(last)
                yield text
    finally:
        if not ended:
            leg.failed()


def _seen(event: str, relay: Relay) -> tuple[Json, str]:
    """A chunk as an object, and as it goes out: its usage true, its transfer parameters ours alone."""
    if not event.startswith("data: {"):
        return {}, event
    chunk = json.loads(event.removeprefix("data: "))
    if _forget_transfer(chunk) | _true_usage(chunk.get("usage"), relay):
        return chunk, _event(chunk)
    return chunk, event


def _event(chunk: Json) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _head(chunk: Json) -> Json:
    return {key: chunk[key] for key in ("id", "object", "created", "model") if key in chunk}


def _forget_transfer(answer: Json) -> bool:
    """The engine's own transfer parameters name the store's key: not the client's business."""
    return answer.pop("kv_transfer_params", None) is not None


def _true_usage(usage: object, relay: Relay) -> bool:
    """The engine counts what a failed load promised as cached; it was prefilled."""
    if not relay.lost or not isinstance(usage, dict):
        return False
    details = usage.get("prompt_tokens_details") or {}
    details["cached_tokens"] = _prefix_hits(relay)
    usage["prompt_tokens_details"] = details
    return True


def _prefix_hits(relay: Relay) -> int:
    return max(0, relay.cached - relay.lost)


def outcome(source: HandoffRecord, relay: Relay, decision: Decision | None) -> dict[str, Any]:
    """Where the KV of a handoff's tokens came from in the end."""
    loaded = relay.loaded or 0
    resident = max(0, _prefix_hits(relay) - loaded)
    recompute = decision is not None and decision.choice is Choice.RECOMPUTE
    found, reason = "recomputed", MISSES.get(relay.miss or "", "not_used" if source.bytes else "kv_gone")
    if relay.lost:
        reason = "load_failed"
    elif loaded and not recompute:
        found, reason = "loaded", ""
    elif resident:
        found, reason = "resident", ""
    elif recompute:
        reason = "slower_to_load"
    return {
        "id": source.id,
        "tokens": len(source.tokens),
        "loaded_tokens": loaded,
        "resident_tokens": resident,
        "outcome": found,
        "reason": reason or None,
        "load_ms": round(relay.load_ms, 1),
    } | (decision.public() if decision is not None else {})

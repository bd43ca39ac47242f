"""`handoff` in a request: start from what another left behind, leave something behind, or both."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.engines.port import Engine, Operation, Relay, Reply, StreamReply, WholeReply
from baton.errors import GenerationFailed, InvalidRequest, OperationUnsupported
from baton.handoffs.coordinator import Handoffs
from baton.handoffs.record import HandoffRecord
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import GatewayMetrics

OPERATIONS = (Operation.COMPLETIONS, Operation.CHAT)
SETTLE_WITHIN_S = 0.25
"""An answer waits this long for its KV to be saved, so that it can mostly say `ready`."""
DONE = "data: [DONE]\n\n"


class SaveWish(BaseModel):
    """`handoff.save` as an object."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    ttl_s: Annotated[int, Field(ge=1)] | None = None
    label: Annotated[str, Field(max_length=200)] | None = None


class HandoffWish(BaseModel):
    """The `handoff` field of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    save: SaveWish | Literal[True, False] = False
    source: str | None = Field(None, alias="from", min_length=1, max_length=64)


@dataclass
class Leg:
    """One request's part in a relay: where it starts and what it leaves."""

    relay: Relay
    source: HandoffRecord | None
    target: HandoffRecord | None


def take_wish(body: dict[str, Any], engine: Engine, operation: Operation) -> HandoffWish | None:
    """Take the `handoff` field out of a body.

    Raises:
        InvalidRequest: it is not one, or does not fit the rest of the body.
        OperationUnsupported: this route or this engine does not hand over.
    """
    given = body.pop("handoff", None)
    if given is None:
        return None
    if operation not in OPERATIONS or not engine.relays:
        raise OperationUnsupported(
            f"'{engine.name}' does not hand over here: use /v1/completions or /v1/chat/completions "
            "and an engine with `handoff = true`.",
            param="handoff",
        )
    try:
        wish = HandoffWish.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(["handoff", *(str(part) for part in first["loc"] if isinstance(part, str))])
        raise InvalidRequest(f"{where}: {first['msg']}", param="handoff") from None
    _require_one_context(body, wish, operation)
    return wish


def _require_one_context(body: dict[str, Any], wish: HandoffWish, operation: Operation) -> None:
    if body.get("n") not in (None, 1) or body.get("use_beam_search"):
        raise InvalidRequest("'n' must be 1 with a handoff.", param="n")
    if body.get("echo"):
        raise InvalidRequest("'echo' does not go with a handoff.", param="echo")
    if operation is Operation.CHAT:
        _require_text_only(body)
        if wish.source is None:
            return
        raise OperationUnsupported(
            "A chat cannot start from a handoff yet; a completion can.", param="handoff.from"
        )
    prompt = body.get("prompt", "" if wish.source else None)
    if not isinstance(prompt, str) and not (
        isinstance(prompt, list) and all(type(token) is int for token in prompt)
    ):
        raise InvalidRequest("With a handoff 'prompt' is one text, or one list of token ids.", param="prompt")
    if body.get("prompt_embeds") is not None:
        raise InvalidRequest("A context with prompt embeddings is not handed over.", param="prompt_embeds")


def _require_text_only(body: dict[str, Any]) -> None:
    """Token ids do not tell an image; a context that holds one is not handed over."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") != "text":
                raise InvalidRequest("Only a context of text is handed over.", param="messages")


async def relayed(
    handoffs: Handoffs,
    engine: Engine,
    operation: Operation,
    body: dict[str, Any],
    context: RequestContext,
    wish: HandoffWish,
    metrics: GatewayMetrics,
) -> Reply:
    """Do a request that is part of a relay.

    Its prompt is always the whole truth: the handoff's token ids and then its own. The entry only
    brings KV for what both share.
    """
    source = await handoffs.source(wish.source, engine, context.tenant) if wish.source else None
    if source is not None:
        own = await _own_tokens(engine, body.get("prompt", ""), context)
        body = body | {"prompt": [*source.tokens, *own], "add_special_tokens": False}
    target = _target(handoffs, engine, context, wish)
    relay = Relay(
        save=target.key if target is not None else None,
        load=source.key if source is not None else None,
    )
    leg = Leg(relay, source, target)
    try:
        reply = await engine.call(operation, body, context, relay)
    except BaseException:
        if target is not None:
            handoffs.end(target, None)
        raise
    if isinstance(reply, StreamReply):
        return StreamReply(_stream(handoffs, leg, reply.events, metrics))
    return await _whole(handoffs, leg, reply, metrics)


def _target(
    handoffs: Handoffs, engine: Engine, context: RequestContext, wish: HandoffWish
) -> HandoffRecord | None:
    if wish.save is False:
        return None
    save = wish.save if isinstance(wish.save, SaveWish) else SaveWish()
    return handoffs.begin(engine, context.tenant, parent=wish.source, label=save.label, ttl_s=save.ttl_s)


async def _own_tokens(engine: Engine, prompt: str | list[int], context: RequestContext) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if not prompt:
        return []
    body = {"model": engine.name, "prompt": prompt, "add_special_tokens": False}
    reply = await engine.call(Operation.TOKENIZE, body, context)
    if not isinstance(reply, WholeReply):
        raise GenerationFailed()
    tokens: list[int] = json.loads(reply.body)["tokens"]
    return tokens


async def _whole(handoffs: Handoffs, leg: Leg, reply: WholeReply, metrics: GatewayMetrics) -> WholeReply:
    answer = json.loads(reply.body)
    _forget_transfer(answer)
    _true_usage(answer.get("usage"), leg.relay)
    answer["handoff"] = await _told(handoffs, leg, metrics)
    return WholeReply(json.dumps(answer).encode(), reply.media_type, reply.headers)


async def _stream(
    handoffs: Handoffs, leg: Leg, events: AsyncIterator[str], metrics: GatewayMetrics
) -> AsyncIterator[str]:
    """The events, and before the last one a chunk of ours that tells of the handoff."""
    ended = False
    last: dict[str, Any] = {}
    try:
        async with aclosing(events) as rest:  # type: ignore[type-var]  # engines hand out generators
            async for event in rest:
                if event == DONE:
                    ended = True
                    told = await _told(handoffs, leg, metrics)
                    yield _event(_head(last) | {"choices": [], "handoff": told})
                    yield event
                    continue
                last, text = _seen(event, leg.relay)
                yield text
    finally:
        if not ended and leg.target is not None:
            handoffs.end(leg.target, None)


def _seen(event: str, relay: Relay) -> tuple[dict[str, Any], str]:
    """A chunk as an object, and as it goes out: its usage true, its transfer parameters ours alone."""
    if not event.startswith("data: {"):
        return {}, event
    chunk = json.loads(event.removeprefix("data: "))
    if _forget_transfer(chunk) | _true_usage(chunk.get("usage"), relay):
        return chunk, _event(chunk)
    return chunk, event


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _head(chunk: dict[str, Any]) -> dict[str, Any]:
    return {key: chunk[key] for key in ("id", "object", "created", "model") if key in chunk}


def _forget_transfer(answer: dict[str, Any]) -> bool:
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


async def _told(handoffs: Handoffs, leg: Leg, metrics: GatewayMetrics) -> dict[str, Any]:
    """The `handoff` object of an answer."""
    told: dict[str, Any] = {}
    if leg.target is not None:
        handoffs.end(leg.target, leg.relay)
        await handoffs.settled(leg.target, SETTLE_WITHIN_S)
        metrics.handoffs.created.inc()
        told = leg.target.public()
    if leg.source is not None:
        told["source"] = _outcome(leg.source, leg.relay)
        metrics.handoffs.consumed.labels(told["source"]["outcome"]).inc()
        metrics.handoffs.tokens_reused.inc(told["source"]["loaded_tokens"])
    return told


def _outcome(source: HandoffRecord, relay: Relay) -> dict[str, Any]:
    loaded = relay.loaded or 0
    resident = _prefix_hits(relay) - loaded
    outcome, reason = "recomputed", "load_failed" if relay.lost else "kv_gone"
    if loaded:
        outcome, reason = "loaded", ""
    elif resident > 0:
        outcome, reason = "resident", ""
    return {
        "id": source.id,
        "tokens": len(source.tokens),
        "loaded_tokens": loaded,
        "resident_tokens": max(0, resident),
        "outcome": outcome,
        "reason": reason or None,
        "load_ms": round(relay.load_ms, 1),
    }

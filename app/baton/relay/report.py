"""Write what became of a request's handoffs into its answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from enum import StrEnum
from typing import Any

from baton.engines.backend import Json, Operation, Reply, StreamReply
from baton.engines.transfers import TransferReport
from baton.library.handoff import Handoff
from baton.relay.cost import Choice, Decision
from baton_kv.contract import TransferFailure

# Report where the KV of a handoff's tokens came from: loaded, resident in the engine, or recomputed.


KV_IS_GONE = (TransferFailure.MISSING, TransferFailure.CORRUPT)
"""Reasons after which a handoff has its token ids only, and is prefilled."""
REASONS = {
    TransferFailure.MISSING: "kv_gone",
    TransferFailure.CORRUPT: "kv_corrupt",
    TransferFailure.INCOMPATIBLE: "kv_incompatible",
    TransferFailure.DEVICE: "store_unreadable",
}
"""`handoff.source.reason` by why the entry could not be used."""


def source_outcome(source: Handoff, report: TransferReport, decision: Decision | None) -> dict[str, Any]:
    """Return `handoff.source`: how many of its tokens were loaded, resident or recomputed, and why."""
    loaded = report.in_place
    resident = max(0, prefix_hits(report) - (report.loaded or 0))
    recompute = decision is not None and decision.choice is Choice.RECOMPUTE
    few = recompute and loaded < len(source.tokens) - 1  # to measure; of a short context they are all
    outcome = "recomputed"
    reason = "not_used" if source.bytes else "kv_gone"
    if report.miss is not None:
        reason = REASONS.get(report.miss, reason)
    if report.lost:
        reason = "load_failed"
    elif loaded and not few:
        outcome, reason = "loaded", ""
    elif resident:
        outcome, reason = "resident", ""
    elif recompute:
        reason = "slower_to_load"
    return {
        "id": source.id,
        "tokens": len(source.tokens),
        "loaded_tokens": loaded,
        "moved_tokens": report.moved,
        "resident_tokens": resident,
        "outcome": outcome,
        "reason": reason or None,
        "load_ms": round(report.load_ms, 1),
    } | (decision.public() if decision is not None else {})


# Say why a prompt was computed though KV of it might have been stored, in OpenAI's shape.


DIAGNOSTICS = "prompt_cache_diagnostics"
"""The field of an answer, as of OpenAI's responses."""


class Miss(StrEnum):
    """The reason why nothing of a prompt came from stored KV, nor from the engine's own cache."""

    NO_CANDIDATE = "no_candidate"
    BELOW_MINIMUM = "below_minimum"
    INPUT_CHANGED = "input_changed"
    EXPIRED = "expired"
    NOT_HERE = "not_here"
    PROMPT_LOGPROBS = "prompt_logprobs"
    SLOWER_TO_LOAD = "slower_to_load"
    KV_GONE = "kv_gone"
    KV_CORRUPT = "kv_corrupt"
    KV_INCOMPATIBLE = "kv_incompatible"
    OTHER_ADAPTER = "other_adapter"
    STORE_UNREADABLE = "store_unreadable"
    LOAD_FAILED = "load_failed"
    NOT_USED = "not_used"


MISSES = {
    Miss.NO_CANDIDATE: "No stored context of the tenant and of these weights begins like the prompt.",
    Miss.BELOW_MINIMUM: "The longest that does shares fewer tokens than `handoffs.auto_min_tokens`.",
    Miss.INPUT_CHANGED: "The prompt leaves the context that the request names too early: at token "
    "`comparison_reusable_tokens`. OpenAI's word.",
    Miss.EXPIRED: "The context that shares most has just expired.",
    Miss.NOT_HERE: "The context that shares most is on another machine; it is fetched for the next request.",
    Miss.PROMPT_LOGPROBS: "The request asks for log probabilities of its prompt, so all of it is computed.",
    Miss.SLOWER_TO_LOAD: "Computing was expected to be faster than loading.",
    Miss.KV_GONE: "The context's KV is not in the store any more: it was evicted, or moved away by an audit.",
    Miss.KV_CORRUPT: "Its stored KV failed verification and was thrown away.",
    Miss.KV_INCOMPATIBLE: "Its KV is of another type, layout, setting or version than this engine's.",
    Miss.OTHER_ADAPTER: "Its KV was computed with another LoRA adapter, or with none.",
    Miss.STORE_UNREADABLE: "The store could not be read. The gateway's log says more.",
    Miss.LOAD_FAILED: "The load failed midway, and its tokens were computed. The gateway's log says more.",
    Miss.NOT_USED: "None of its KV fitted the beginning of this prompt, such as for other images.",
}
"""What each reason means; the documentation is made of this."""


def diagnostics(reason: str | None, prompt: int, shared: int | None = None) -> Json:
    """Return `prompt_cache_diagnostics` of an answer.

    Args:
        reason: why nothing was reused; None: something was.
        prompt: number of the prompt's tokens.
        shared: number of these, from the first, that the context which was looked at shares; None: none was.
    """
    if reason is None:
        return {"type": "cache_hit"}
    missed = {"cache_missed_tokens": max(0, prompt - (shared or 0)), "reason": reason}
    return (
        {"type": "cache_miss"} | missed | ({} if shared is None else {"comparison_reusable_tokens": shared})
    )


def source_diagnostics(shown: Json, prompt: int) -> Json:
    """Return the diagnostics of a request that names a handoff, from its `handoff.source`."""
    reason, shared = shown["reason"], shown["shared_tokens"]
    if reason == Miss.NOT_USED and shared < shown["tokens"]:
        reason = Miss.INPUT_CHANGED
    return diagnostics(reason, prompt, shared)


def explained(reply: Reply, operation: Operation, told: Callable[[], Json | None]) -> Reply:
    """Add the diagnostics to an answer, or to the event of a stream that has its usage.

    Args:
        told: returns them, once the answer is complete; None: there are none.
    """
    if isinstance(reply, StreamReply):
        return StreamReply(explained_events(reply.events, operation, told), reply.headers)
    found = told()
    if found is None or not reply.body.endswith(b"}"):
        return reply
    field = f',"{DIAGNOSTICS}":{json.dumps(found)}}}'.encode()  # an answer is never an empty object
    return replace(reply, body=reply.body[:-1] + field)


MARKS = {
    Operation.COMPLETIONS: ('"choices":[]', '"choices": []'),
    Operation.CHAT: ('"choices":[]', '"choices": []'),
    Operation.RESPONSES: ("event: response.completed", "event: response.incomplete"),
    Operation.MESSAGES: ("event: message_delta",),
}
"""What the event with a stream's usage holds. No text of an answer does: its quotes are escaped."""


async def explained_events(
    events: AsyncIterator[str], operation: Operation, told: Callable[[], Json | None]
) -> AsyncIterator[str]:
    """Pass on the events of a stream, with the diagnostics in the one that has its usage."""
    marks = MARKS[operation]
    async with aclosing(events) as rest:  # type: ignore[type-var]  # engines hand out generators
        async for event in rest:
            if any(mark in event for mark in marks) and (found := told()) is not None:
                yield "".join(_explained(each, marks, found) for each in apart(event))
            else:
                yield event


def apart(several: str) -> list[str]:
    """Split events that an engine sent together."""
    return [f"{event}\n\n" for event in several.split("\n\n") if event]


def _explained(event: str, marks: tuple[str, ...], found: Json) -> str:
    if not any(mark in event for mark in marks):
        return event
    head, mark, data = event.rpartition("data: ")
    said = json.loads(data)
    target = said.get("response", said)
    if target.get("usage") is None:
        return event
    target[DIAGNOSTICS] = found
    return f"{head}{mark}{json.dumps(said)}\n\n"


# Read and rewrite an engine's replies to requests with handoffs.


DONE = "data: [DONE]\n\n"


def without_keys(answer: Json) -> bool:
    """Drop the engine's transfer parameters from an answer, or a chunk of one; return whether there were any.

    They hold the store's key, which clients must not see.
    """
    return answer.pop("kv_transfer_params", None) is not None


def prefix_hits(report: TransferReport) -> int:
    """Return how many tokens came from the cache and were not prefilled."""
    return max(0, report.cached - report.lost)


def chunk_of(event: str) -> tuple[Json, str]:
    """Return a server-sent event's chunk as an object, and the event as it is sent on."""
    if not event.startswith("data: {"):
        return {}, event
    chunk = json.loads(event.removeprefix("data: "))
    if without_keys(chunk):
        return chunk, event_of(chunk)
    return chunk, event


def event_of(chunk: Json) -> str:
    """Return a chunk as a server-sent event."""
    return f"data: {json.dumps(chunk)}\n\n"


def head_of(chunk: Json) -> Json:
    """Return the fields that all chunks of an answer share."""
    return {key: chunk[key] for key in ("id", "object", "created", "model") if key in chunk}

"""Put our name of a model into a server's answers, count their tokens, and find errors in their streams."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import structlog

from baton.engines.port import Json, Operation
from baton.engines.remote.refusals import fields_of, not_an_answer, of_the_server_itself, shown
from baton.engines.remote.server_events import ServerEvent
from baton.errors import RemoteFailed
from baton.telemetry.ids import RequestContext

log = structlog.get_logger("baton.engine")

DONE = "[DONE]"
WITH_USAGE = (Operation.COMPLETIONS, Operation.CHAT)
"""Operations whose streams tell the number of their tokens only if they are asked to."""
LAST_EVENTS = {
    Operation.COMPLETIONS: (DONE,),
    Operation.CHAT: (DONE,),
    Operation.RESPONSES: ("response.completed", "response.incomplete", "response.failed"),
    Operation.MESSAGES: ("message_stop",),
}
"""What the last event of a whole stream holds."""
MOST_TOKENS = 10**9
"""Tokens of one request above which a server's number is taken for none."""
OF_TEXT = ("response.output_text.delta", "content_block_delta")
"""Types of events with a piece of the answer, about one token each."""


@dataclass
class Names:
    """A model's name on both sides.

    Attributes:
        there: on the other server.
        here: what our clients know.
    """

    there: str
    here: str

    def put(self, answer: Json) -> bool:
        """Write our name into an answer or an event; returns whether that changed it."""
        changed = False
        for place in (answer, answer.get("response"), answer.get("message")):
            if isinstance(place, dict) and isinstance(place.get("model"), str):
                changed |= place["model"] != self.here
                place["model"] = self.here
        handoff = answer.get("handoff")
        if isinstance(handoff, dict) and handoff.get("model") == self.there:
            changed |= self.there != self.here
            handoff["model"] = self.here
        return changed


@dataclass
class TokenCount:
    """The tokens of one request, as the other server counts them.

    Attributes:
        context: where they are counted.
        prompt: prompt tokens so far.
        generated: generated tokens so far; until the server names them, the pieces of the answer.
        told: whether the server has named the generated ones.
    """

    context: RequestContext
    prompt: int = 0
    generated: int = 0
    told: bool = field(default=False)

    def read(self, answer: Json) -> None:
        """Take the `usage` of an answer, or of an event."""
        for place in (answer, answer.get("response"), answer.get("message")):
            usage = place.get("usage") if isinstance(place, dict) else None
            if isinstance(usage, dict):
                prompt = _number(usage, "prompt_tokens", "input_tokens")
                generated = _number(usage, "completion_tokens", "output_tokens")
                self._set(prompt or self.prompt, generated or self.generated)
                self.told = self.told or generated > 0

    def piece(self) -> None:
        """Count one piece of an answer."""
        if not self.told:
            self._set(self.prompt, self.generated + 1)

    def _set(self, prompt: int, generated: int) -> None:
        self.context.prompt_tokens += prompt - self.prompt
        self.context.generated_tokens += generated - self.generated
        self.prompt, self.generated = prompt, generated


def _number(usage: Json, *names: str) -> int:
    values = (usage.get(name) for name in names)
    return next((value for value in values if type(value) is int and 0 <= value <= MOST_TOKENS), 0)


@dataclass
class StreamReader:
    """Reads the events of one stream on their way to the client.

    Attributes:
        operation: the operation.
        names: of the model.
        count: of its tokens.
        hides_usage: whether the client did not ask for the chunk with `usage`, but we did.
        complete: whether the last event has come.
    """

    operation: Operation
    names: Names
    count: TokenCount
    hides_usage: bool
    complete: bool = False

    @property
    def may_just_end(self) -> bool:
        """Whether some servers end such streams without a last event."""
        return self.operation not in WITH_USAGE

    def passed_on(self, event: ServerEvent) -> str:
        """Return an event as the client gets it; empty: it gets none.

        Raises:
            RemoteFailed: the event is an error, or no JSON.
        """
        if event.data == DONE:
            self.complete = True
            return str(event)
        try:
            parsed = json.loads(event.data)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise not_an_answer("an event that is no JSON object")
        self._refuse_error(event, parsed)
        kind = parsed.get("type") or event.name
        self.complete = self.complete or kind in LAST_EVENTS[self.operation]
        self._count(parsed, kind)
        if self.hides_usage and _is_usage(parsed):
            return ""
        changed = self.names.put(parsed) or "\n" in event.data
        return str(ServerEvent(event.name, json.dumps(parsed)) if changed else event)

    def _refuse_error(self, event: ServerEvent, parsed: Json) -> None:
        fields = fields_of(parsed)
        if fields is None and event.name == "error":  # of OpenAI's responses: not below `error`
            known: Json = {key: parsed[key] for key in ("message", "code", "param") if key in parsed}
            fields = shown(known) if isinstance(known.get("message"), str) else {}
        if fields is None:
            return
        log.error("remote_stream_failed", engine=self.names.here, cause=str(fields.get("message"))[:300])
        if of_the_server_itself(fields):
            del fields["message"]  # as with an answer in one piece, ours is told
        raise RemoteFailed(fields=fields)

    def _count(self, parsed: Json, kind: Any) -> None:
        self.count.read(parsed)
        if kind in OF_TEXT or parsed.get("choices"):
            self.count.piece()


def _is_usage(chunk: Json) -> bool:
    return chunk.get("choices") == [] and "usage" in chunk and "handoff" not in chunk

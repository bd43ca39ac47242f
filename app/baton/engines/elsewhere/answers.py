"""Read a server's answers, errors and events, which are hostile until proved."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import structlog
from jiter import from_json

from baton.engines.backend import Json, Operation
from baton.engines.scrub import scrub
from baton.errors import BatonError, OperationUnsupported, RemoteBusy, RemoteFailed, RemoteRefusal
from baton.telemetry.ids import RequestContext

ERROR_BYTES = 64 * 1024
"""Most bytes of an error that are read."""
LONGEST_CODE = 64
"""Characters of an error's code, which our log holds too."""
SHOWN = ("message", "type", "param", "code")
"""Fields of an error that clients see; of a Baton's they see all."""
LONGEST_WAIT_S = 3600
BUSY = (429, 503)
KEY_REFUSED = (401, 403, 407)
NO_SUCH_ROUTE = (404, 405)
HALVES = re.compile(rb"\\u[dD]")
"""Of a character beyond 16 bits a stream may have one half in each of two events."""


def not_an_answer(what: str) -> RemoteFailed:
    """Return the error for what is no answer, or no whole one: "an event that is no text", for example."""
    return RemoteFailed(f"The server that answers for this model sent {what}.")


def parsed_json(text: bytes) -> tuple[Any, bool]:
    """Parse JSON of a server elsewhere; `NaN` and numbers without end, which are no JSON, become null.

    Returns:
        The value, and whether something became null, so that it has to be written again.

    Raises:
        ValueError: it is no JSON, or nested too deep.
    """
    # It goes less deep than whoever reads the answer again. Halves of characters it would refuse.
    from_json(HALVES.sub(rb"\\u0", text), allow_inf_nan=True)
    nulls: list[str] = []

    def finite(number: str) -> float | None:
        if math.isfinite(value := float(number)):
            return value
        nulls.append(number)
        return None

    return json.loads(text, parse_float=finite, parse_constant=nulls.append), bool(nulls)


def refusal(engine: str, status: int, headers: Mapping[str, str], body: bytes) -> BatonError:
    """Make the error for an answer that is none, of its `error` in OpenAI's or Anthropic's shape."""
    try:
        fields = fields_of(parsed_json(body)[0])
    except ValueError:
        fields = None
    server = f"The server that answers for '{engine}'"
    if status in BUSY:
        wait_s = retry_after_s(headers.get("retry-after"))
        fields = fields or ({"type": "rate_limit_error"} if status == 429 else {})  # else a 429 is as a 503
        return RemoteBusy(status=status, retry_after_s=wait_s, fields=fields)
    if status in KEY_REFUSED:
        return RemoteFailed(f"{server} refuses this gateway's key.")
    if not 400 <= status < 500:
        return RemoteFailed(f"{server} failed (status {status}).")
    if fields is None:
        if status in NO_SUCH_ROUTE:
            return OperationUnsupported(f"{server} does not support this operation.")
        return RemoteFailed(f"{server} answered with status {status}, and no error that clients know.")
    if status == 404 and (fields.get("param") == "model" or fields.get("code") == "model_not_found"):
        return RemoteFailed(f"{server} does not serve the model that it is asked for.")
    return RemoteRefusal(fields["message"], status=status, fields=fields)


def fields_of(parsed: object) -> Json | None:
    """Return the `error` object of a parsed body; None: it has none with a message."""
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return shown(error)
    return None


def shown(error: Json) -> Json:
    """Return the fields of an error that clients may see, and a code that is one.

    A Baton has scrubbed its messages already, and its errors alone name a request.
    """
    fields = error if "request_id" in error else {name: error[name] for name in SHOWN if name in error}
    if fields is not error:
        fields["message"] = scrub(error["message"])
    code = fields.get("code")
    is_code = isinstance(code, str | int) and len(str(code)) <= LONGEST_CODE
    return fields if is_code or "code" not in fields else fields | {"code": None}


def retry_after_s(value: str | None) -> int | None:
    """Return the seconds that a `Retry-After` names, as a number or as a date; None: it names none."""
    if value is None:
        return None
    try:
        seconds = int(value) if value.strip().isdecimal() else parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    if not value.strip().isdecimal():
        seconds -= time.time()
    return max(1, min(LONGEST_WAIT_S, round(seconds)))


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class ServerEvent:
    """One event.

    Attributes:
        name: its `event`; empty: it has none.
        data: its `data`; several lines are joined.
    """

    name: str
    data: str

    def __str__(self) -> str:
        lines = "".join(f"data: {line}\n" for line in self.data.split("\n"))
        return f"event: {self.name}\n{lines}\n" if self.name else f"{lines}\n"


class EventSplitter:
    """Splits the bytes of a stream into server-sent events (HTML standard, section 9.2.6).

    Args:
        most: bytes that one event may have.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest = bytearray()
        self._searched = 0
        self._began = False
        self._return = False

    @property
    def held(self) -> int:
        """Bytes of an event that is not complete."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[ServerEvent]:
        """Return the events that these bytes complete; comments are left out.

        Raises:
            RemoteFailed: an event is too long, or no text.
        """
        self._rest += self._with_line_feeds(data)
        if not self._began and len(self._rest) >= len(BYTE_ORDER_MARK):
            self._began = True
            if self._rest.startswith(BYTE_ORDER_MARK):
                del self._rest[: len(BYTE_ORDER_MARK)]
        events = []
        while (end := self._rest.find(b"\n\n", max(0, self._searched - 1))) >= 0:
            event = _event(bytes(self._rest[:end]))
            del self._rest[: end + 2]
            self._searched = 0
            if event is not None:
                events.append(event)
        self._searched = len(self._rest)
        if len(self._rest) > self._most:
            raise not_an_answer("an event that is too long")
        return events

    def _with_line_feeds(self, data: bytes) -> bytes:
        """Return bytes with a line feed at the end of each line, where the stream may have CR, or both."""
        if not data:
            return data
        if self._return and data[:1] == b"\n":
            data = data[1:]
        self._return = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


def _event(block: bytes) -> ServerEvent | None:
    """Return the event that a block of lines is; None: it has no data."""
    try:
        lines = block.decode().split("\n")
    except UnicodeDecodeError:
        raise not_an_answer("an event that is no text") from None
    name, data = "", []
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
    return ServerEvent(name, "\n".join(data)) if data else None


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
        here: of our engine, which records of handoffs hold.
        asked: what the client called it.
    """

    there: str
    here: str
    asked: str

    def put(self, answer: Json) -> bool:
        """Write our name into an answer or an event; returns whether that changed it."""
        changed = False
        for place in (answer, answer.get("response"), answer.get("message")):
            if isinstance(place, dict) and isinstance(place.get("model"), str):
                changed |= place["model"] != self.asked
                place["model"] = self.asked
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
        """True if some servers end such streams without a last event."""
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
            parsed, nulled = parsed_json(event.data.encode())
        except ValueError:
            parsed, nulled = None, False
        if not isinstance(parsed, dict):
            raise not_an_answer("an event that is no JSON object")
        self._refuse_error(event, parsed)
        kind = parsed.get("type") or event.name
        self.complete = self.complete or kind in LAST_EVENTS[self.operation]
        self.count.read(parsed)
        if kind in OF_TEXT or parsed.get("choices"):
            self.count.piece()
        if self.hides_usage and parsed.get("choices") == [] and "usage" in parsed and "handoff" not in parsed:
            return ""
        changed = self.names.put(parsed) or nulled or "\n" in event.data
        return str(ServerEvent(event.name, json.dumps(parsed)) if changed else event)

    def _refuse_error(self, event: ServerEvent, parsed: Json) -> None:
        fields = fields_of(parsed)
        if fields is None and event.name == "error":  # of OpenAI's responses: not below `error`
            known: Json = {key: parsed[key] for key in ("message", "code", "param") if key in parsed}
            fields = shown(known) if isinstance(known.get("message"), str) else {}
        if fields is None:
            return
        log.error("remote_stream_failed", engine=self.names.here, cause=str(fields.get("message"))[:300])
        if type(code := fields.get("code")) is int and code >= 500:  # vLLM's word for a fault of its own
            del fields["message"]  # as with an answer in one piece, ours is told
        raise RemoteFailed(fields=fields)

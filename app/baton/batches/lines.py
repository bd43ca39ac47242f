"""Read a batch's input file, as OpenAI's Batches define it: one request a line, each with an id of its own.

A file is hostile until it is read: it is read line by line, no line is longer than a request's body, and
what is kept of a line is a few dozen bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from baton.batches.store import Batch, Line, Usage, answer_id
from baton.config.groups import LimitSettings
from baton.engines.backend import Json
from baton.errors import BatonError, GenerationFailed

MOST_ERRORS = 100
"""Errors of one file that are told; more would tell nobody more."""
MOST_MODELS = 32
"""Models that one file may name."""
LONGEST_ID = 512
CONTEXT = (
    "model",
    "tools",
    "system",
    "instructions",
    "prompt",
    "messages",
    "input",
    "query",
    "queries",
    "data",
)
"""Fields of a body that make its prompt, those first that many lines have in common."""
LEVELS = tuple(128 << level for level in range(12))
"""Lengths of beginnings of prompts, in characters, by which lines are put together."""


@dataclass
class Input:
    """The lines of an input file, and what is wrong with it.

    Attributes:
        lines: in the order in which they are to be run.
        models: the models that they name, each with the first line that names it; None: none is named.
        errors: what is wrong, in OpenAI's shape; the file is not run if there is anything.
    """

    lines: list[Line] = field(default_factory=list)
    models: dict[str | None, int] = field(default_factory=dict)
    errors: list[Json] = field(default_factory=list)

    def refuse(self, line: int | None, code: str, message: str, param: str | None = None) -> None:
        """Note an error."""
        self.errors.append({"code": code, "line": line, "message": message, "param": param})

    @property
    def too_bad(self) -> bool:
        """True if so much is wrong that the rest is not read."""
        return len(self.errors) >= MOST_ERRORS


class Reader:
    """Reads input files.

    Args:
        parse: parses a line within limits, as a request's body is parsed.
        most: lines that a file may have.

    Attributes:
        limits: of a line; they may change.
    """

    def __init__(
        self, parse: Callable[[bytes, LimitSettings], Json], limits: LimitSettings, most: int
    ) -> None:
        self._parse = parse
        self.limits = limits
        self._most = most

    def read(self, file: BinaryIO, endpoint: str) -> Input:
        """Read a whole file; takes seconds for a large one."""
        found, ids, ordered = Input(), set[bytes](), list[tuple[bytes, int, Line]]()
        for number, start, line in self._lines(file, found):
            if found.too_bad:
                break
            if len(ordered) >= self._most:
                found.refuse(
                    number,
                    "too_many_requests",
                    f"The file has more than {self._most} requests (setting batches.file_lines): split it.",
                )
                break
            read = self._request(number, line, endpoint, found)
            if read is None:
                continue
            custom_id, body = read
            if (short := _digest(custom_id, 16)) in ids:
                found.refuse(
                    number,
                    "duplicate_custom_id",
                    f"The custom_id {custom_id[:64]!r} is that of another line too: each line needs its own.",
                    "custom_id",
                )
                continue
            ids.add(short)
            self._note_model(number, body, found)
            row = Line(0, number, start, len(line), custom_id)
            ordered.append((_beginnings(body), number, row))
        if not ordered and not found.errors:
            found.refuse(None, "empty_file", "The input file holds no request: put one on each line.")
        found.lines = list(_in_order(ordered))
        return found

    def _lines(self, file: BinaryIO, found: Input) -> Iterator[tuple[int, int, bytes]]:
        """Yield the lines that are not blank, each with its number and where it begins."""
        number = start = 0
        longest = int(self.limits.body_bytes)
        while line := file.readline(longest + 1):
            number += 1
            if len(line) > longest:
                found.refuse(
                    number,
                    "line_too_long",
                    f"The line has more than {longest} bytes (setting limits.body_bytes).",
                )
                return  # the rest of the line may be the rest of the file
            if line.strip():
                yield number, start, line
            start += len(line)

    def _request(self, number: int, line: bytes, endpoint: str, found: Input) -> tuple[str, Json] | None:
        """Return the id and the body of a line; None: it is wrong, which is noted."""
        try:
            said = self._parse(line, self.limits)
        except BatonError as error:
            message = error.message.replace("The request body", "The line")
            found.refuse(number, "invalid_json_line", message)
            return None
        before = len(found.errors)
        custom_id, body = said.get("custom_id"), said.get("body")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= LONGEST_ID:
            found.refuse(
                number,
                "missing_required_parameter" if custom_id is None else "invalid_custom_id",
                f"'custom_id' must be a text of 1 to {LONGEST_ID} characters.",
                "custom_id",
            )
        if said.get("method") != "POST":
            found.refuse(number, "invalid_method", "'method' must be 'POST'.", "method")
        if said.get("url") != endpoint:
            found.refuse(
                number, "mismatched_url", f"'url' must be the batch's endpoint, '{endpoint}'.", "url"
            )
        if not isinstance(body, dict):
            found.refuse(number, "invalid_body", "'body' must be an object: the request's body.", "body")
        elif body.get("stream"):
            found.refuse(
                number, "invalid_body", "A line's answer is a whole one: leave 'stream' out.", "body.stream"
            )
        for name in said.keys() - FIELDS:
            found.refuse(
                number, "unknown_parameter", f"There is no field {name[:40]!r} in a line.", name[:40]
            )
            break
        if len(found.errors) > before:
            return None
        assert isinstance(custom_id, str)
        assert isinstance(body, dict)
        return custom_id, body

    def _note_model(self, number: int, body: Json, found: Input) -> None:
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            found.refuse(number, "invalid_body", "'model' must be a name.", "body.model")
        elif model not in found.models:
            found.models[model] = number
            if len(found.models) > MOST_MODELS:
                found.refuse(
                    number,
                    "too_many_models",
                    f"A file may name {MOST_MODELS} models: split it.",
                    "body.model",
                )


FIELDS = frozenset({"custom_id", "method", "url", "body"})


def _beginnings(body: Json) -> bytes:
    """Return digests of the beginnings of a prompt, the shortest first.

    Sorted by them, prompts with a common beginning stand side by side, those with a longer one closer: what
    they share is computed once, as long as it stays in the engine's cache.
    """
    text = json.dumps([body[name] for name in CONTEXT if name in body], ensure_ascii=False)
    short = (level for level in LEVELS if level < len(text))
    return b"".join(_digest(text[:level], 4) for level in short)


def _in_order(read: Collection[tuple[bytes, int, Line]]) -> Iterator[Line]:
    """Yield lines by their beginnings, and within those as they stand in the file, each with its place."""
    for place, (_, _, line) in enumerate(sorted(read, key=lambda each: each[:2])):
        yield Line(place, line.number, line.start, line.size, line.custom_id)


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


def body_of(line: bytes) -> bytes:
    """Return the body of a request that is a line which was read before."""
    return json.dumps(json.loads(line)["body"], ensure_ascii=False).encode()


@dataclass(frozen=True)
class Answer:
    """The answer to a line.

    Attributes:
        status: its HTTP status.
        body: what was answered, as JSON.
        request_id: id of the request, as the log has it.
        code: code of the error; None: there is none.
        again_s: seconds after which the same request may be answered; None: this is the answer.
    """

    status: int
    body: bytes
    request_id: str
    code: str | None = None
    again_s: int | None = None

    @property
    def good(self) -> bool:
        """True if it belongs into the output file, not the error file."""
        return 200 <= self.status < 300


def unreadable(answer: Answer) -> Answer:
    """Make the answer of a line whose own cannot be read."""
    error = GenerationFailed("The engine's answer is no JSON that can be read.")
    body = json.dumps(error.body(answer.request_id)).encode()
    return Answer(error.status, body, answer.request_id, error.code)


def refusal_in(answer: Answer) -> Json:
    """Return code and message of an answer that refuses a line for now."""
    try:
        said = json.loads(answer.body)
    except (ValueError, RecursionError):
        said = None
    error = said.get("error") if isinstance(said, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return {"code": answer.code, "message": message or "The engine takes no lines now."}


def written_answer(batch: Batch, line: Line, answer: Answer) -> tuple[str, Usage]:
    """Write an answer as a line of the output; return it with its tokens."""
    body = json.loads(answer.body)
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
    row = {
        "id": answer_id(batch, line.number),
        "custom_id": line.custom_id,
        "response": response,
        "error": None,
    }
    usage = body.get("usage") if isinstance(body, dict) else None
    return json.dumps(row), _usage(usage if isinstance(usage, dict) else {})


def _usage(said: Json) -> Usage:
    """Return the tokens that an answer says, by the names of whichever API."""
    cached = _count(said, "cache_read_input_tokens")
    beside = cached + _count(said, "cache_creation_input_tokens")  # Anthropic's are not among the input's
    prompt, answer = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")
    return Usage(
        _count(said, *prompt) + beside,
        cached + sum(_count(said.get(f"{name}_details"), "cached_tokens") for name in prompt),
        _count(said, *answer),
        sum(_count(said.get(f"{name}_details"), "reasoning_tokens") for name in answer),
    )


def _count(said: object, *names: str) -> int:
    """Return the first number under one of these names; 0: there is none."""
    found = (said.get(name) for name in names) if isinstance(said, dict) else ()
    return next((value for value in found if isinstance(value, int) and 0 <= value < 2**53), 0)

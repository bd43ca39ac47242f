"""Translate between the client's calls and httpx, for both drivers."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import httpx

from baton_client.call import Call, Reply, Told, Upload
from baton_client.errors import BadAnswer, ConnectionLost, TimedOut
from baton_client.values import Json, Progress

CONNECT_WITHIN_S = 10.0
PLAIN = {"Accept-Encoding": "identity"}
"""A few bytes of a compressed answer may stand for all of a machine's memory."""
OF_A_FILE = 64
"""A file may have this many times the bytes of an answer in memory."""
FAILED_MIDWAY = 500
"""Stands for the status of an error that comes as an event of a stream, which has none."""
SET_ONCE = frozenset({"role", "id", "type"})
"""Texts of a delta that are not continued by the next."""
NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
WORTH_RESENDING = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Options(TypedDict):
    """The options with which sync and async httpx clients are made."""

    base_url: str
    headers: dict[str, str]
    timeout: httpx.Timeout


def client_options(base_url: str, api_key: str | None, timeout_s: float) -> Options:
    """Choose the options of an httpx client.

    Args:
        base_url: of the gateway, with `/v1` at its end or without.
        api_key: sent with every request, if there is one.
        timeout_s: most seconds between two pieces of an answer, and before its first.
    """
    return {
        "base_url": base_url.rstrip("/").removesuffix("/v1"),
        "headers": PLAIN | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        "timeout": httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_WITHIN_S)),
    }


def options_of(call: Call[Any], *, asynchronous: bool) -> dict[str, Any]:
    """Return the arguments of `httpx.Client.stream` for a call."""
    options: dict[str, Any] = {"method": call.method, "url": call.path, "headers": dict(call.headers)}
    if call.params:
        options["params"] = dict(call.params)
    if isinstance(call.body, Upload):
        options["content"] = call.body.pieces_async() if asynchronous else call.body.pieces()
    elif call.body is not None:
        options["json"] = call.body
    return options


def lost_of(error: httpx.RequestError, base_url: httpx.URL, *, answered: bool) -> ConnectionLost:
    """Return the client's error for httpx's."""
    reason = str(error) or type(error).__name__
    kind = TimedOut if isinstance(error, httpx.TimeoutException) else ConnectionLost
    what = "The answer broke off" if answered else "No answer came"
    advice = "Raise timeout_s" if kind is TimedOut else "Check base_url, and that the gateway runs"
    return kind(
        f"{what} from {base_url}: {reason}. {advice}.",
        sent=not isinstance(error, NEVER_SENT),
        answered=answered,
        resend=isinstance(error, WORTH_RESENDING),
    )


class Arrival:
    """Takes an answer in, into memory or into the call's file.

    The file appears under its name once it is whole; until then it has a name of its own beside it.

    Args:
        most: bytes that the answer may have in memory.

    Attributes:
        begun: whether the answer's first bytes have come.
        to_file: whether pieces are written to a file.
    """

    def __init__(self, call: Call[Any], most: int) -> None:
        self.begun = False
        self.to_file = False
        self._call = call
        self._most = most
        self._pieces: list[bytes] = []
        self._file: BinaryIO | None = None
        self._done = 0
        self._stream: ChatStream | None = None

    def begin(self, response: httpx.Response) -> None:
        """Take in the status and the headers.

        Raises:
            BadAnswer: the answer is compressed.
        """
        self.begun = True
        if response.headers.get("content-encoding", "identity") != "identity":
            raise BadAnswer(
                f"The answer to {self._call.method} {self._call.path} is compressed, which was not asked "
                "for: if a proxy before the gateway does it, turn that off."
            )
        self._response = response
        length = response.headers.get("content-length", "")
        self._total = int(length) if length.isdigit() else None
        if self._call.target is not None and response.is_success:
            self._file = _open_beside(self._call.target)
            self.to_file = True
            self._most *= OF_A_FILE
        kind = response.headers.get("content-type", "").partition(";")[0]
        if self._call.told is not None and response.is_success and kind == "text/event-stream":
            self._stream = ChatStream(self._call.told)

    def write(self, piece: bytes) -> None:
        """Take in a piece of the body; one for a file may be written in a thread."""
        if self._file is not None:
            self._file.write(piece)
        elif self._stream is not None:
            self._stream.write(piece)
        else:
            self._pieces.append(piece)

    def count(self, piece: bytes) -> None:
        """Count a piece before it is taken in.

        Raises:
            BadAnswer: the answer is too large.
        """
        self._done += len(piece)
        if self._done > self._most:
            raise BadAnswer(
                f"The answer to {self._call.method} {self._call.path} has more than {self._most} bytes: if "
                "it may, raise max_answer_bytes of the client."
            )

    def report(self) -> None:
        """Report how far the answer has come."""
        if self._call.report is not None and self._response.is_success:
            self._call.report(Progress("receiving", self._done, self._total))

    def end(self) -> Reply:
        """Return the whole answer.

        Raises:
            ConnectionLost: a stream of events ended before its last one.
        """
        if self._stream is not None:
            return self._stream.end(self._response.status_code, self._response.headers)
        if self._file is not None and self._call.target is not None:
            self._file.close()
            os.replace(self._file.name, self._call.target)
            self._file = None
        return Reply(self._response.status_code, self._response.headers, b"".join(self._pieces))

    def close(self) -> None:
        """Remove the file of an answer that broke off."""
        if self._file is not None:
            self._file.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._file.name)
            self._file = None


class ChatStream:
    """Puts the events of a streamed chat together, as the answer that would have come whole.

    Args:
        told: called with each piece of the first answer's text.
    """

    def __init__(self, told: Told) -> None:
        self._told = told
        self._line: list[bytes] = []
        self._body: Json = {}
        self._texts: list[str] = []
        self._message: Json = {"role": "assistant"}
        self._finish: str | None = None
        self._failed: bytes | None = None
        self._ended = False

    def write(self, piece: bytes) -> None:
        """Take in a piece of the stream; events may be cut anywhere."""
        *lines, rest = piece.split(b"\n")
        for part in lines:
            line = b"".join([*self._line, part])
            self._line = []
            if line.startswith(b"data:"):
                for text in self._take(line.removeprefix(b"data:").strip()):
                    self._texts.append(text)
                    self._told(text)
        self._line.append(rest)

    def _take(self, data: bytes) -> list[str]:
        """Take in an event; returns the text that it holds."""
        if data == b"[DONE]":
            self._ended = True
            return []
        try:
            chunk: Json = json.loads(data)
            if "error" in chunk:
                self._failed = self._failed or data
                return []
            self._body |= {name: value for name, value in chunk.items() if value is not None}
            firsts = [choice for choice in chunk.get("choices") or () if not choice.get("index")]
            for choice in firsts:
                self._finish = choice.get("finish_reason") or self._finish
                _merge(self._message, _without_content(choice))
            return [text for choice in firsts if (text := (choice.get("delta") or {}).get("content"))]
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise BadAnswer(f"An event of the stream is not in the API's form: {error}.") from error

    def end(self, status: int, headers: Mapping[str, str]) -> Reply:
        """Return the answer that would have come whole.

        Raises:
            ConnectionLost: the last event did not come.
        """
        if self._failed is not None:
            return Reply(FAILED_MIDWAY, headers, self._failed)
        if not self._ended:
            raise ConnectionLost(
                "The answer broke off: its last event did not come.", answered=True, resend=False
            )
        message = self._message | {"content": "".join(self._texts)}
        choice = {"index": 0, "message": message, "finish_reason": self._finish}
        body = self._body | {"object": "chat.completion", "choices": [choice]}
        return Reply(status, headers, json.dumps(body).encode())


def _without_content(choice: Json) -> Json:
    """Return a choice's delta but for its text, whose pieces are many."""
    return {name: value for name, value in (choice.get("delta") or {}).items() if name != "content"}


def _merge(whole: Json, part: Json) -> None:
    """Add the pieces of a delta: texts are continued, lists by each entry's `index`, the rest is set."""
    for name, value in part.items():
        had = whole.get(name)
        if isinstance(value, dict):
            _merge(whole.setdefault(name, {}), value)
        elif isinstance(value, list):
            entries = whole.setdefault(name, [])
            for entry in value:
                place = entry.get("index", len(entries))
                if place >= len(entries):
                    entries.append({})
                _merge(entries[place], {key: each for key, each in entry.items() if key != "index"})
        elif isinstance(value, str) and isinstance(had, str) and name not in SET_ONCE:
            whole[name] = had + value
        elif value is not None:
            whole[name] = value


def _open_beside(target: Path) -> BinaryIO:
    """Open a new, hidden file in the folder of `target`."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.part").open("xb")

"""Translate the error that a server elsewhere answers with into one of ours, or pass it on."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from jiter import from_json

from baton.engines.port import Json
from baton.engines.scrub import scrub
from baton.errors import BatonError, OperationUnsupported, RemoteBusy, RemoteFailed, RemoteRefusal

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
    """Return the error for an answer that is none.

    Args:
        engine: name of the engine.
        status: of the answer.
        headers: of the answer.
        body: of the answer, as far as it was read.
    """
    fields = error_fields(body)
    server = f"The server that answers for '{engine}'"
    if status in BUSY:
        wait_s = retry_after_s(headers.get("retry-after"))
        return RemoteBusy(status=status, retry_after_s=wait_s, fields=_with_type(fields, status))
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


def _with_type(fields: Json | None, status: int) -> Json:
    """Return the fields of an error; without any, those in which a 429 differs from a 503."""
    return fields or ({"type": "rate_limit_error"} if status == 429 else {})


def error_fields(body: bytes | str) -> Json | None:
    """Return the `error` object of a body in OpenAI's or Anthropic's shape; None: it has another shape."""
    try:
        parsed, _ = parsed_json(body if isinstance(body, bytes) else body.encode())
    except ValueError:
        return None
    return fields_of(parsed)


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


def of_the_server_itself(fields: Json) -> bool:
    """Return whether an error within a stream is of the server's inside, as vLLM says with a number."""
    return type(code := fields.get("code")) is int and code >= 500


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

"""Define what every error has, and the three kinds below it: the client's, the server's, the operator's."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

LONGEST_WORD = 128
"""Characters of a wrong name that are compared and shown."""


class BatonError(Exception):
    """Base of every error that Baton raises on purpose.

    Args:
        message: what is wrong, in which field, and what to do; clients see it unchanged.
        param: the request field at fault, if there is one.
        retry_after_s: seconds after which a retry makes sense; only for retryable errors.
    """

    code: str = "internal_error"
    status: int = 500
    kind: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False
    ends_connection: bool = False
    """Whether the connection is closed after the answer, because the rest of the request is not read."""
    default_message: ClassVar[str] = "The server could not answer this request."

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        self.message = message or self.default_message
        self.param = param
        self.retry_after_s = (retry_after_s or 1) if self.retryable else None
        super().__init__(self.message)

    @property
    def reason(self) -> str:
        """The code as a metrics label: one of the tree above, even if `code` is a plugin's own."""
        return type(self).code

    def body(self, request_id: str) -> dict[str, Any]:
        """Return the JSON body of this error, in OpenAI's shape with `request_id`."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
                "request_id": request_id,
            }
        }


class ClientError(BatonError):
    status = 400
    kind = "invalid_request_error"


class ServerError(BatonError):
    pass


class OperatorError(BatonError):
    """Base of errors that the person who starts Baton has to fix."""

    exit_code: ClassVar[int] = 1


def with_fields(body: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an error with the fields of another server's; the request id stays ours."""
    ours = body["error"]
    return {"error": {**ours, **fields, "request_id": ours["request_id"]}}


def did_you_mean(word: str, known: Iterable[str], *, alike: float = 0.5) -> str:
    """Return a sentence with the known name nearest to `word`, to add to a message; empty: none is near.

    Args:
        word: the wrong name.
        known: the right ones.
        alike: how near a name must be, between 0 and 1.
    """
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word[:LONGEST_WORD].lower(), names, n=1, cutoff=alike)
    return f" Did you mean '{names[near[0]]}'?" if near else ""

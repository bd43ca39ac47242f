"""Define every error that the client raises on purpose.

BatonError
├── ConnectionLost          no answer came, or only a part of one
│   └── TimedOut            none came in time
├── BadAnswer               what answered is no Baton gateway, or the answer is too large
├── HandoffFailed           the request that should have saved the handoff failed
├── HandoffNotReady         the handoff is still pending after the time that was given
├── SceneFailed             a scene that was sent as a job failed
└── ApiError                the gateway answered with an error
    ├── InvalidRequest      400, 413, 422 and other 4xx: the request has to be changed
    ├── NotAllowed          401, 403: the key is missing, wrong, or may not do this
    ├── NotFound            404, 410: no such handoff, model or route
    ├── Conflict            409: the handoff is pending, or of another model
    ├── Overloaded          429, 503: try again later
    └── ServerFailed        other 5xx: the gateway, an engine or a plugin failed
"""

from __future__ import annotations

import re

UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, with which a text can rule the terminal that shows it; not line breaks and tabs."""
LONGEST = 10_000
"""Characters of a message that are kept."""


def printable(text: str | None) -> str | None:
    """Write out the control characters of a text that somebody else sent; what is no text stays."""
    if not isinstance(text, str):
        return text
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text[:LONGEST])


class BatonError(Exception):
    """Base of every error that this package raises on purpose; its message may be shown on a terminal."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class ConnectionLost(BatonError):
    """No answer came, or only a part of one.

    Attributes:
        sent: whether the gateway may have received the request.
        answered: whether a part of the answer had arrived.
        resend: whether sending it again may help.
    """

    def __init__(
        self, message: str, *, sent: bool = True, answered: bool = False, resend: bool = True
    ) -> None:
        super().__init__(message)
        self.sent = sent
        self.answered = answered
        self.resend = resend


class TimedOut(ConnectionLost):
    """No answer came in time."""


class BadAnswer(BatonError):
    """The answer is not in the form in which Baton answers, or has more bytes than `max_answer_bytes`."""


class HandoffFailed(BatonError):
    """The request that should have saved the handoff failed; create the handoff again."""


class HandoffNotReady(BatonError):
    """The handoff is still pending after the time that was given; wait longer."""


class SceneFailed(BatonError):
    """A scene that was sent as a job failed.

    Attributes:
        scene_id: its name under `/v1/scenes`.
        code: the error's stable name, such as `raster_unusable`; None: the gateway named none.
    """

    def __init__(self, message: str, scene_id: str, code: str | None) -> None:
        super().__init__(message)
        self.scene_id = scene_id
        self.code = printable(code)


class ApiError(BatonError):
    """The gateway answered with an error.

    Attributes:
        status: HTTP status.
        code: the error's stable name, such as `handoff_not_found`; None: the answer named none.
        message: what is wrong and what to do, as the gateway says it.
        param: the request's field at fault; None: no single field is.
        retry_after_s: seconds after which a retry makes sense; None: the gateway named none.
        request_id: the gateway's id of the request, for its logs.
    """

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        param: str | None = None,
        *,
        retry_after_s: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(f"{message} ({', '.join(str(each) for each in (status, code, param) if each)})")
        self.status = status
        self.code = printable(code)
        self.message = printable(message) or ""
        self.param = printable(param)
        self.retry_after_s = retry_after_s
        self.request_id = printable(request_id)


class InvalidRequest(ApiError):
    """The request has to be changed: `param` names the field."""


class NotAllowed(ApiError):
    """The API key is missing, wrong, or may not do this."""


class NotFound(ApiError):
    """There is no such handoff, model or route, or it is gone."""


class Conflict(ApiError):
    """The handoff is still pending, or the model cannot continue it."""


class Overloaded(ApiError):
    """The gateway or the engine has too much to do, or is restarting; try again later."""


class ServerFailed(ApiError):
    """The gateway, an engine or a plugin failed on this request."""


BY_STATUS: dict[int, type[ApiError]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    410: NotFound,
    429: Overloaded,
    503: Overloaded,
}


def error_class(status: int) -> type[ApiError]:
    """Return the class of the error for an HTTP status of 300 or more."""
    return BY_STATUS.get(status) or (ServerFailed if status >= 500 else InvalidRequest)

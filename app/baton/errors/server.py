"""Define the errors that are answered with 5xx: the gateway or an engine is at fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors.base import ServerError, with_fields


class InternalError(ServerError):
    pass


class GenerationFailed(ServerError):
    code = "generation_failed"
    default_message = "The engine failed while it worked on this request."


class EngineOverloaded(ServerError):
    code = "engine_overloaded"
    status = 503
    retryable = True
    default_message = "The engine's queue is full; try again shortly."


class EngineUnavailable(ServerError):
    code = "engine_unavailable"
    status = 503
    retryable = True
    default_message = "The engine that serves this model is not available right now."


class EngineRestarting(EngineUnavailable):
    code = "engine_restarting"
    default_message = "The engine failed while it worked on this request and is being restarted; try again."


class ShuttingDown(ServerError):
    code = "shutting_down"
    status = 503
    retryable = True
    default_message = (
        "The server is shutting down; send the request again, to another server or after the restart."
    )


class TooManyConnections(ServerError):
    code = "too_many_connections"
    status = 503
    retryable = True
    default_message = "Too many clients are connected; try again shortly."


class GatewayOverloaded(ServerError):
    code = "gateway_overloaded"
    status = 503
    retryable = True
    default_message = "The server is short of memory and accepts no new requests for now; try again shortly."


class HandoffStoreUnavailable(ServerError):
    code = "handoff_store_unavailable"
    status = 503
    retryable = True
    default_message = "The shared store of handoffs does not answer; try again shortly."


class RemoteFailed(ServerError):
    """The server that the request was sent on to failed, answered what it should not, or cannot be reached.

    Args:
        message: what happened.
        fields: of the error that the server sent within a stream, which the client gets.
    """

    code = "remote_failed"
    status = 502
    default_message = "The server that answers for this model failed on this request."

    def __init__(self, message: str | None = None, *, fields: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self._fields = dict(fields or {})
        self.code = str(self._fields.get("code") or self.code)

    def body(self, request_id: str) -> dict[str, Any]:
        return with_fields(super().body(request_id), self._fields)


class RemoteUnreachable(RemoteFailed):
    code = "remote_unreachable"
    status = 503
    retryable = True
    default_message = (
        "The server that answers for this model cannot be reached; it did not get the request, try again."
    )


class RemoteLost(RemoteFailed):
    code = "remote_lost"
    status = 503
    retryable = True
    default_message = (
        "The connection to the server that answers for this model was lost while it worked on this request; "
        "try again."
    )


class RemoteTimeout(ServerError):
    code = "remote_timeout"
    status = 504
    default_message = "The server that answers for this model took too long."


class RemoteBusy(ServerError):
    """The server that the request was sent on to has too much to do (503), or limits this gateway (429).

    Args:
        message: what happened.
        status: 429 or 503.
        retry_after_s: as the server says.
        fields: of its error, which the client gets; empty: it sent none.
    """

    code = "remote_busy"
    status = 503
    retryable = True
    default_message = "The server that answers for this model has too much to do; try again shortly."

    def __init__(
        self,
        message: str | None = None,
        *,
        status: int = 503,
        retry_after_s: int | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.status = status
        self._fields = dict(fields or {})
        self.code = str(self._fields.get("code") or self.code)

    def body(self, request_id: str) -> dict[str, Any]:
        return with_fields(super().body(request_id), self._fields)


class PluginFailed(ServerError):
    code = "plugin_failed"
    default_message = "The plugin that handles this model's requests failed on this one."


class PluginBusy(ServerError):
    code = "plugin_busy"
    status = 503
    retryable = True
    default_message = (
        "The plugin that handles this model's requests has too many of them at once; try again shortly."
    )

    def __init__(self, message: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.code


class PluginTimeout(ServerError):
    code = "plugin_timeout"
    status = 504

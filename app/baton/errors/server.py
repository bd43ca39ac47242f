"""Define the errors that are answered with 5xx: the gateway or an engine is at fault."""

from __future__ import annotations

from baton.errors.base import ServerError


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

"""Every error a client or an operator can meet.

    BatonError
    ├── ClientError                  4xx: the request is at fault
    │   ├── InvalidJson              400 invalid_json
    │   ├── InvalidRequest           400 invalid_request
    │   │   └── ImagesMisplaced      400 images_misplaced
    │   ├── MalformedRequest         400 malformed_request
    │   ├── ContextTooLong           400 context_length_exceeded
    │   ├── InvalidImage             400 invalid_image
    │   │   └── ImageTooLarge        400 image_too_large
    │   ├── ImageFetchFailed         400 image_fetch_failed
    │   ├── OperationUnsupported     400 operation_unsupported
    │   ├── TemplateUnsupported      400 handoff_template_unsupported
    │   ├── Unauthorized             401 invalid_api_key
    │   ├── OriginNotAllowed         403 origin_not_allowed
    │   ├── OperatorKeyNeeded        403 operator_key_needed
    │   ├── ModelNotAllowed          403 model_not_allowed
    │   ├── QuotaReached             403 quota_reached
    │   ├── NotFound                 404 not_found
    │   │   ├── ModelNotFound        404 model_not_found
    │   │   ├── HandoffNotFound      404 handoff_not_found
    │   │   ├── ResponseNotFound     404 response_not_found
    │   │   ├── ClientFileNotFound   404 file_not_found
    │   │   ├── BatchNotFound        404 batch_not_found
    │   │   └── SceneNotFound        404 scene_not_found
    │   ├── MethodNotAllowed         405 method_not_allowed
    │   ├── NotAcceptable            406 not_acceptable
    │   ├── RequestTimeout           408 request_timeout
    │   ├── HandoffIncompatible      409 handoff_incompatible
    │   ├── HandoffPending           409 handoff_pending         (retryable)
    │   ├── HandoffPinsFull          409 handoff_pins_full
    │   ├── FileInUse                409 file_in_use
    │   ├── SceneNotReady            409 scene_not_ready
    │   ├── IdempotencyKeyReused     409 idempotency_key_reused
    │   ├── HandoffImagesLost        410 handoff_images_lost
    │   ├── BodyTooLarge             413 body_too_large
    │   ├── UriTooLong               414 uri_too_long
    │   ├── UnsupportedMediaType     415 unsupported_media_type
    │   ├── RangeNotSatisfiable      416 range_not_satisfiable
    │   ├── HostNotAllowed           421 host_not_allowed
    │   ├── Unprocessable            422 unprocessable
    │   ├── HeadersTooLarge          431 headers_too_large
    │   ├── SettingsRefused          422 settings_refused
    │   ├── RateLimited              429 rate_limited            (retryable)
    │   │   └── BudgetSpent          429 budget_spent            (retryable)
    │   ├── RemoteRefusal            400 remote_refusal          (or another server's own status and code)
    │   └── PluginRefusal            400 plugin_refusal          (or the plugin's own status and code)
    ├── ServerError                  5xx: the gateway or an engine is at fault
    │   ├── InternalError            500 internal_error
    │   ├── GenerationFailed         500 generation_failed
    │   ├── PluginFailed             500 plugin_failed
    │   ├── RemoteFailed             502 remote_failed         (in a stream: or another server's own code)
    │   │   ├── RemoteLost           503 remote_lost         (retryable)
    │   │   └── RemoteUnreachable    503 remote_unreachable  (retryable)
    │   ├── EngineOverloaded         503 engine_overloaded     (retryable)
    │   ├── EngineUnavailable        503 engine_unavailable    (retryable)
    │   │   └── EngineRestarting     503 engine_restarting     (retryable)
    │   ├── ShuttingDown             503 shutting_down         (retryable)
    │   ├── TooManyConnections       503 too_many_connections  (retryable)
    │   ├── GatewayOverloaded        503 gateway_overloaded    (retryable)
    │   ├── HandoffStoreUnavailable  503 handoff_store_unavailable (retryable)
    │   ├── UsageUnavailable         503 usage_unavailable     (retryable)
    │   ├── StorageFull              503 storage_full          (retryable)
    │   ├── PluginBusy               503 plugin_busy           (retryable) or the plugin's own code
    │   ├── RemoteBusy               503 remote_busy           (retryable) or 429, or another's own code
    │   ├── RemoteTimeout            504 remote_timeout
    │   └── PluginTimeout            504 plugin_timeout
    └── OperatorError                not sent over HTTP: one paragraph on the terminal, and an exit code
        ├── SettingsError            exit 2
        ├── StartError               exit 1
        └── FleetLost                exit 1

`code` is stable: clients may branch on it. `kind` is OpenAI's `type`. `retryable` errors carry a
`Retry-After`. Messages are written for the person who reads them, and never hold an exception's text, a
path or a class name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

# Define what every error has, and the three kinds below it: the client's, the server's, the operator's.


LONGEST_WORD = 128
"""Characters of a wrong name that are compared and shown."""


class BatonError(Exception):
    """Base of every error that Baton raises on purpose.

    Args:
        message: what is wrong, in which field, and what to do; clients see it unchanged.
        param: the request field at fault, if there is one.
        retry_after_s: seconds after which a retry makes sense; only for retryable errors.
        status: of another server's or a plugin's error, instead of the class's own; so is `code`.
        fields: of another server's error, which the client gets in place of ours.
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
        status: int | None = None,
        code: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.message = message or self.default_message
        self.param = param
        self.status = status or self.status
        self._fields = dict(fields or {})
        self.code = code or str(self._fields.get("code") or self.code)
        self.retry_after_s = (retry_after_s or 1) if self.retryable else None
        super().__init__(self.message)

    @property
    def reason(self) -> str:
        """The code as a metrics label: one of the tree above, even if `code` is a plugin's own."""
        return type(self).code

    def body(self, request_id: str) -> dict[str, Any]:
        """Write the JSON body of this error, in OpenAI's shape with `request_id`."""
        ours = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        last = {"request_id": request_id}  # never another server's
        return {"error": ours | last | self._fields | last}


class ClientError(BatonError):
    status = 400
    kind = "invalid_request_error"


class ServerError(BatonError):
    pass


class OperatorError(BatonError):
    """Base of errors that the person who starts Baton has to fix."""

    exit_code: ClassVar[int] = 1


def did_you_mean(word: str, known: Iterable[str], *, alike: float = 0.5) -> str:
    """Return a sentence with the known name nearest to `word`, to add to a message; empty: none is near.

    Args:
        alike: how near a name must be, between 0 and 1.
    """
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word[:LONGEST_WORD].lower(), names, n=1, cutoff=alike)
    return f" Did you mean '{names[near[0]]}'?" if near else ""


# Define the errors that are answered with 4xx: the request is at fault.


class InvalidJson(ClientError):
    code = "invalid_json"
    default_message = "The request body is not valid JSON."


class InvalidRequest(ClientError):
    code = "invalid_request"
    default_message = "The request is not valid."


class ImagesMisplaced(InvalidRequest):
    code = "images_misplaced"
    default_message = "The prompt must have exactly one placeholder for each image."


class MalformedRequest(ClientError):
    """The request is not well-formed HTTP/1.1, or is ambiguous; the connection is closed."""

    code = "malformed_request"
    ends_connection = True
    default_message = "The request is not well-formed HTTP/1.1."


class ContextTooLong(ClientError):
    code = "context_length_exceeded"
    default_message = (
        "The prompt and the requested tokens do not fit the model's context: shorten the prompt, or ask for "
        "fewer tokens."
    )


class InvalidImage(ClientError):
    """An image cannot be decoded, or its format or size is not accepted."""

    code = "invalid_image"


class ImageTooLarge(InvalidImage):
    code = "image_too_large"


class ImageFetchFailed(ClientError):
    """An image's URL is allowed, but fetching it failed."""

    code = "image_fetch_failed"


class OperationUnsupported(ClientError):
    code = "operation_unsupported"
    default_message = "This model does not support this operation."


class TemplateUnsupported(ClientError):
    code = "handoff_template_unsupported"
    default_message = (
        "No message can follow this handoff: the model's chat template writes earlier messages differently "
        "once others follow, or the handoff ends with text that is not a message. Continue it with "
        "/v1/completions."
    )


class Unauthorized(ClientError):
    code = "invalid_api_key"
    status = 401
    kind = "authentication_error"
    default_message = "A valid API key is needed: send it as 'Authorization: Bearer KEY'."


class OriginNotAllowed(ClientError):
    """A browser reports that another site's page sent the request, and the gateway has no API keys."""

    code = "origin_not_allowed"
    status = 403
    kind = "permission_error"
    default_message = (
        "Without API keys, web pages of other sites may not send requests that change something, and this "
        "request comes from one. Make a key with `baton keys create`, or add the page's origin to the "
        "setting edge.allowed_origins."
    )


class OperatorKeyNeeded(ClientError):
    """The request changes what the gateway serves or starts and stops engines, and its key is no operator's.

    Nor is anybody without keys, unless the gateway is on loopback.
    """

    code = "operator_key_needed"
    status = 403
    kind = "permission_error"
    default_message = (
        "Only operators may start and stop engines and change what the gateway serves, and this key is no "
        "operator's: whoever runs the gateway makes one with `baton keys create TENANT --operator`."
    )


class ModelNotAllowed(ClientError):
    """The key names models, and the request's is none of them."""

    code = "model_not_allowed"
    status = 403
    kind = "permission_error"
    default_message = "This key may not use this model."


class QuotaReached(ClientError):
    """A tenant's files or batches are as many, or as large, as they may be."""

    code = "quota_reached"
    status = 403
    kind = "permission_error"


class NotFound(ClientError):
    code = "not_found"
    status = 404
    kind = "not_found_error"
    default_message = "There is no route with this path."


class ModelNotFound(NotFound):
    code = "model_not_found"

    @classmethod
    def among(cls, model: str, served: Sequence[str]) -> ModelNotFound:
        """Return the error that names the nearest of the served models, and all of them."""
        return cls(
            f"The model '{model[:LONGEST_WORD]}' is not served here.{did_you_mean(model, served)} "
            f"Served are: {', '.join(served)}.",
            param="model",
        )


class HandoffNotFound(NotFound):
    code = "handoff_not_found"
    default_message = "There is no handoff with this id: it is unknown, expired or deleted."


class ResponseNotFound(NotFound):
    code = "response_not_found"
    default_message = (
        "There is no stored response with this id: it is unknown, expired or deleted, or was not stored."
    )


class ClientFileNotFound(NotFound):
    code = "file_not_found"
    default_message = "There is no file with this id: it is unknown, expired or deleted."


class BatchNotFound(NotFound):
    code = "batch_not_found"
    default_message = "There is no batch with this id: it is unknown, or ended long ago."


class SceneNotFound(NotFound):
    code = "scene_not_found"
    default_message = (
        "There is no scene with this id, or no file of this name of it: it is unknown, expired or deleted."
    )


class SceneNotReady(ClientError):
    code = "scene_not_ready"
    status = 409
    default_message = (
        "The scene has no files: it is not done yet, or has failed; GET /v1/scenes/{id} says which."
    )


class IdempotencyKeyReused(ClientError):
    code = "idempotency_key_reused"
    status = 409
    default_message = (
        "A request with another body had this Idempotency-Key; take a new key for a new request."
    )


class RangeNotSatisfiable(ClientError):
    code = "range_not_satisfiable"
    status = 416

    def __init__(self, size: int = 0) -> None:
        self.size = size
        super().__init__(f"The file has {size} bytes; the range begins after them.", param="range")


class RequestTimeout(ClientError):
    code = "request_timeout"
    ends_connection = True
    status = 408
    default_message = "The request came too slowly; send it again on a new connection."


class HandoffIncompatible(ClientError):
    code = "handoff_incompatible"
    status = 409


class HandoffPending(ClientError):
    code = "handoff_pending"
    status = 409
    retryable = True
    default_message = "The request that saves this handoff has not ended yet; try again shortly."


class HandoffPinsFull(ClientError):
    code = "handoff_pins_full"
    status = 409
    default_message = (
        "The part of the store that may be pinned, or your share of it, is used up: unpin another of your "
        "handoffs, or try again when others have expired."
    )


class FileInUse(ClientError):
    code = "file_in_use"
    status = 409
    default_message = "A batch that has not ended reads this file: wait for it, or cancel it first."


class HandoffImagesLost(ClientError):
    code = "handoff_images_lost"
    status = 410
    default_message = (
        "An image of this handoff's context can no longer be read, so the handoff cannot be continued; "
        "send the whole context again."
    )


class MethodNotAllowed(ClientError):
    code = "method_not_allowed"
    status = 405
    default_message = "This path does not support this method."


class NotAcceptable(ClientError):
    code = "not_acceptable"
    status = 406


class BodyTooLarge(ClientError):
    code = "body_too_large"
    ends_connection = True
    status = 413


class UriTooLong(ClientError):
    code = "uri_too_long"
    ends_connection = True
    status = 414
    default_message = "The URL of the request is too long; send its parameters in the body."


class UnsupportedMediaType(ClientError):
    code = "unsupported_media_type"
    status = 415
    default_message = "Send the body as JSON, with 'Content-Type: application/json'."


class HostNotAllowed(ClientError):
    """The `Host` header names a host under which the gateway does not answer."""

    code = "host_not_allowed"
    status = 421


class Unprocessable(ClientError):
    code = "unprocessable"
    status = 422
    default_message = "A part of the request could not be processed."


class HeadersTooLarge(ClientError):
    code = "headers_too_large"
    ends_connection = True
    status = 431
    default_message = "The request has too many headers, or they are too long."


class RateLimited(ClientError):
    code = "rate_limited"
    status = 429
    kind = "rate_limit_error"
    retryable = True
    default_message = "Too many requests; try again after the number of seconds in 'Retry-After'."


class BudgetSpent(RateLimited):
    """The key has used the tokens of its day or its month; `budget` says which, and when it begins anew."""

    code = "budget_spent"


class SettingsRefused(ClientError):
    """The settings were to be read again, and are not valid, or ask for what needs a restart to begin."""

    code = "settings_refused"
    status = 422


class RemoteRefusal(ClientError):
    """The server that the request was sent on to refuses it; the client gets that server's error."""

    code = "remote_refusal"


class PluginRefusal(ClientError):
    """A plugin's own refusal of a request, under the plugin's own code where it has one."""

    code = "plugin_refusal"


# Define the errors that end the command: whoever starts Baton has to fix something.


class SettingsError(OperatorError):
    exit_code = 2


class StartError(OperatorError):
    pass


class FleetLost(OperatorError):
    """Every engine has failed too often while the gateway ran."""


# Define the errors that are answered with 5xx: the gateway or an engine is at fault.


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


class UsageUnavailable(ServerError):
    code = "usage_unavailable"
    status = 503
    retryable = True
    default_message = "The usage cannot be read or written now; try again shortly."


class StorageFull(ServerError):
    code = "storage_full"
    status = 503
    retryable = True
    default_message = (
        "The disk that files and batches are kept on is full: delete files that you need no more, or ask "
        "whoever runs the gateway for room."
    )


class RemoteFailed(ServerError):
    """The server that the request was sent on to failed, answered wrongly, or cannot be reached."""

    code = "remote_failed"
    status = 502
    default_message = "The server that answers for this model failed on this request."


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
    """The server that the request was sent on to has too much to do (503), or limits this gateway (429)."""

    code = "remote_busy"
    status = 503
    retryable = True
    default_message = "The server that answers for this model has too much to do; try again shortly."


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


class PluginTimeout(ServerError):
    code = "plugin_timeout"
    status = 504

"""Define the errors that are answered with 4xx: the request is at fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors.base import LONGEST_WORD, ClientError, did_you_mean, with_fields


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
        "request comes from one. Make a key with `baton keys create`, or add the page's host to the setting "
        "edge.allowed_hosts."
    )


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


class RemoteRefusal(ClientError):
    """The server that the request was sent on to refuses it; the client gets that server's error.

    Args:
        message: the server's.
        status: the server's.
        fields: of the server's error.
    """

    code = "remote_refusal"

    def __init__(
        self,
        message: str | None = None,
        *,
        status: int | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status or self.status
        self._fields = dict(fields or {})
        self.code = str(self._fields.get("code") or self.code)

    def body(self, request_id: str) -> dict[str, Any]:
        return with_fields(super().body(request_id), self._fields)


class PluginRefusal(ClientError):
    """A plugin's own refusal of a request, under the plugin's own code where it has one."""

    code = "plugin_refusal"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.status = status or self.status
        self.code = code or self.code

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
    │   ├── NotFound                 404 not_found
    │   │   ├── ModelNotFound        404 model_not_found
    │   │   ├── HandoffNotFound      404 handoff_not_found
    │   │   └── ResponseNotFound     404 response_not_found
    │   ├── MethodNotAllowed         405 method_not_allowed
    │   ├── NotAcceptable            406 not_acceptable
    │   ├── RequestTimeout           408 request_timeout
    │   ├── HandoffIncompatible      409 handoff_incompatible
    │   ├── HandoffPending           409 handoff_pending         (retryable)
    │   ├── HandoffPinsFull          409 handoff_pins_full
    │   ├── HandoffImagesLost        410 handoff_images_lost
    │   ├── BodyTooLarge             413 body_too_large
    │   ├── UriTooLong               414 uri_too_long
    │   ├── UnsupportedMediaType     415 unsupported_media_type
    │   ├── HostNotAllowed           421 host_not_allowed
    │   ├── Unprocessable            422 unprocessable
    │   ├── HeadersTooLarge          431 headers_too_large
    │   ├── RateLimited              429 rate_limited            (retryable)
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

from baton.errors.base import BatonError, ClientError, OperatorError, ServerError
from baton.errors.client import (
    BodyTooLarge,
    ContextTooLong,
    HandoffImagesLost,
    HandoffIncompatible,
    HandoffNotFound,
    HandoffPending,
    HandoffPinsFull,
    HeadersTooLarge,
    HostNotAllowed,
    ImageFetchFailed,
    ImagesMisplaced,
    ImageTooLarge,
    InvalidImage,
    InvalidJson,
    InvalidRequest,
    MalformedRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotAcceptable,
    NotFound,
    OperationUnsupported,
    OriginNotAllowed,
    PluginRefusal,
    RateLimited,
    RemoteRefusal,
    RequestTimeout,
    ResponseNotFound,
    TemplateUnsupported,
    Unauthorized,
    Unprocessable,
    UnsupportedMediaType,
    UriTooLong,
)
from baton.errors.operator import FleetLost, SettingsError, StartError
from baton.errors.server import (
    EngineOverloaded,
    EngineRestarting,
    EngineUnavailable,
    GatewayOverloaded,
    GenerationFailed,
    HandoffStoreUnavailable,
    InternalError,
    PluginBusy,
    PluginFailed,
    PluginTimeout,
    RemoteBusy,
    RemoteFailed,
    RemoteLost,
    RemoteTimeout,
    RemoteUnreachable,
    ShuttingDown,
    TooManyConnections,
)

__all__ = [
    "BatonError",
    "BodyTooLarge",
    "ClientError",
    "ContextTooLong",
    "EngineOverloaded",
    "EngineRestarting",
    "EngineUnavailable",
    "FleetLost",
    "GatewayOverloaded",
    "GenerationFailed",
    "HandoffImagesLost",
    "HandoffIncompatible",
    "HandoffNotFound",
    "HandoffPending",
    "HandoffPinsFull",
    "HandoffStoreUnavailable",
    "HeadersTooLarge",
    "HostNotAllowed",
    "ImageFetchFailed",
    "ImageTooLarge",
    "ImagesMisplaced",
    "InternalError",
    "InvalidImage",
    "InvalidJson",
    "InvalidRequest",
    "MalformedRequest",
    "MethodNotAllowed",
    "ModelNotFound",
    "NotAcceptable",
    "NotFound",
    "OperationUnsupported",
    "OperatorError",
    "OriginNotAllowed",
    "PluginBusy",
    "PluginFailed",
    "PluginRefusal",
    "PluginTimeout",
    "RateLimited",
    "RemoteBusy",
    "RemoteFailed",
    "RemoteLost",
    "RemoteRefusal",
    "RemoteTimeout",
    "RemoteUnreachable",
    "RequestTimeout",
    "ResponseNotFound",
    "ServerError",
    "SettingsError",
    "ShuttingDown",
    "StartError",
    "TemplateUnsupported",
    "TooManyConnections",
    "Unauthorized",
    "Unprocessable",
    "UnsupportedMediaType",
    "UriTooLong",
]

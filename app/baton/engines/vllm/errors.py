"""vLLM's exceptions and error answers, translated at the seam into Baton's.

Messages of client errors are vLLM's own words, because they name the field and the limit; paths,
addresses and class names are taken out. Messages of server errors are always ours.
"""

from __future__ import annotations

import re
from http import HTTPStatus

from pydantic import ValidationError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import (
    GenerationError,
    GracefulHTTPError,
    RetryableRequestError,
    VLLMClientError,
    VLLMError,
    VLLMNotFoundError,
    VLLMServerError,
    VLLMUnprocessableEntityError,
    VLLMValidationError,
)
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from baton.engines.scrub import scrub
from baton.errors import (
    BatonError,
    ContextTooLong,
    EngineOverloaded,
    EngineRestarting,
    EngineUnavailable,
    GenerationFailed,
    ImagesMisplaced,
    InternalError,
    InvalidImage,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    OperationUnsupported,
    Unprocessable,
)
from baton_vision.contract import MISCOUNTED

TABLE: tuple[tuple[type[BaseException], type[BatonError]], ...] = (
    (EngineDeadError, EngineRestarting),
    (RetryableRequestError, EngineUnavailable),
    (EngineGenerateError, GenerationFailed),
    (GenerationError, GenerationFailed),
    (GracefulHTTPError, EngineOverloaded),
    (VLLMUnprocessableEntityError, Unprocessable),
    (VLLMNotFoundError, ModelNotFound),
    (VLLMValidationError, InvalidRequest),
    (VLLMClientError, InvalidRequest),
    (VLLMServerError, InternalError),
    (VLLMError, InternalError),
    # Raw exceptions that vLLM's serving code still raises for bad requests, by its own table.
    (NotImplementedError, OperationUnsupported),
    (ValueError, InvalidRequest),
    (TypeError, InvalidRequest),
    (OverflowError, InvalidRequest),
    # And what its code meets in a request of a shape nobody thought of; always logged with its traceback.
    (LookupError, Unprocessable),
    (AttributeError, Unprocessable),
    (AssertionError, Unprocessable),
)
"""The first row that fits an exception decides."""
UNFORESEEN = (LookupError, AttributeError, AssertionError)
"""What vLLM's code raises at a shape nobody thought of."""

MISPLACED_IMAGES = (
    "prompt placeholders corresponding to",
    "prompt updates corresponding to",
    "Failed to apply prompt replacement for mm_items",
    MISCOUNTED,
)
"""vLLM's words and our models', in errors of several types, for images that a prompt has no place for."""
UNPROCESSED_IMAGE = re.compile(r"Failed to apply \w+ on data=")
"""Its words for what a model's own image processor raised; the data itself follow."""

CONTEXT_WORDS = ("maximum context length", "max_model_len", "maximum model length")


def translate(error: BaseException) -> BatonError:
    """The `BatonError` that stands for a foreign exception."""
    if isinstance(error, BatonError):
        return error
    if isinstance(error, ValidationError):
        ours_to_mend = error.title.endswith(("Response", "StreamResponse", "Event"))
        return GenerationFailed() if ours_to_mend else from_validation(error)
    if (about_images := _of_images(str(error))) is not None:
        return about_images
    for foreign, ours in TABLE:
        if isinstance(error, foreign):
            return _build(ours, error)
    if any(cls.__name__ == "TemplateError" for cls in type(error).__mro__):
        return InvalidRequest("The model's chat template refuses these messages: " + scrub(str(error)))
    return InternalError()


def _of_images(said: str) -> BatonError | None:
    if any(words in said for words in MISPLACED_IMAGES):
        return ImagesMisplaced(
            "The prompt has not one place for each of its images: send images in messages of the user, where "
            "the model's chat template has a place for them, and leave what stands for one out of texts.",
            param="messages",
        )
    if UNPROCESSED_IMAGE.search(said):
        return InvalidImage("The model's image processor cannot take one of these images; send another size.")
    return None


def _build(ours: type[BatonError], error: BaseException) -> BatonError:
    if not isinstance(error, UNFORESEEN) and issubclass(ours, InvalidRequest | NotFound | Unprocessable):
        message = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
        return client_error(ours, message, getattr(error, "parameter", None))
    return ours()


def client_error(ours: type[BatonError], message: str, param: str | None) -> BatonError:
    """A client error in vLLM's words, made fit to show."""
    text = scrub(message)
    if ours is InvalidRequest and any(word in text for word in CONTEXT_WORDS):
        ours = ContextTooLong
    return ours(text, param=param)


def from_response(response: ErrorResponse) -> BatonError:
    """The `BatonError` for an error answer that a vLLM handler returned instead of raising."""
    error = response.error
    if error.code == HTTPStatus.NOT_FOUND:
        missing = ModelNotFound if error.param == "model" else NotFound
        return client_error(missing, error.message, error.param)
    if error.code == HTTPStatus.NOT_IMPLEMENTED:
        return OperationUnsupported(scrub(error.message))
    if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
        return EngineOverloaded()
    if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return GenerationFailed()
    return client_error(InvalidRequest, error.message, error.param)


def from_validation(error: ValidationError) -> BatonError:
    """A pydantic refusal of the body: the first field at fault, and how many more there are."""
    items = error.errors(include_url=False, include_input=False)
    first = items[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, VLLMValidationError):
        return translate(cause)
    field = ".".join(str(part) for part in first["loc"] if _is_field(str(part)))
    wants_object = first["type"] in ("model_type", "dataclass_type", "model_attributes_type")
    message = "Input should be an object" if wants_object else first["msg"].removeprefix("Value error, ")
    text = f"{field}: {message}" if field else message
    if len(items) > 1:
        text += f" (and {len(items) - 1} more)"
    return client_error(InvalidRequest, text, field or None)


def _is_field(part: str) -> bool:
    """Whether a part of a pydantic location is a name or an index the client wrote."""
    return re.fullmatch(r"[a-z_][a-z0-9_]*|\d+", part) is not None and part not in _INNER_PARTS


_INNER_PARTS = {"str", "int", "float", "bool", "list", "dict", "nullable", "union", "chain"}


__all__ = ["client_error", "create_error_response", "from_response", "from_validation", "scrub", "translate"]

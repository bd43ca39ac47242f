"""Translate vLLM's exceptions and error answers into Baton's errors.

Messages of client errors are vLLM's own, scrubbed, because they name the field and the limit. Messages of
server errors are always Baton's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
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

from baton.config.groups import EngineSettings
from baton.engines.json_schemas import fault_of
from baton.engines.scrub import scrub
from baton.engines.vllm.arguments import SERVING_OPTIONS
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
from baton.errors.invalid_fields import MOST_FAULTS, invalid_field
from baton_vision.contract import MISCOUNTED

ARGUMENTS = frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs))
"""The arguments of an engine that its `args` table may hold."""
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
    # Python's exceptions that vLLM's serving code raises for bad requests, by its own table.
    (NotImplementedError, OperationUnsupported),
    (ValueError, InvalidRequest),
    (TypeError, InvalidRequest),
    (OverflowError, InvalidRequest),
    # Exceptions at a request of a shape that vLLM does not expect; always logged with their traceback.
    (LookupError, Unprocessable),
    (AttributeError, Unprocessable),
    (AssertionError, Unprocessable),
)
"""vLLM's exception and Baton's error for it; the first row that fits decides."""
UNFORESEEN = (LookupError, AttributeError, AssertionError)
"""Exceptions at a request of a shape that vLLM does not expect."""

MISPLACED_IMAGES = (
    "prompt placeholders corresponding to",
    "prompt updates corresponding to",
    "Failed to apply prompt replacement for mm_items",
    MISCOUNTED,
)
"""Texts of vLLM's and Baton's models' errors, of several types, when a prompt has no place for an image."""
UNPROCESSED_IMAGE = re.compile(r"Failed to apply \w+ on data=")
"""Text of vLLM's error when a model's own image processor raised; the image's data follow it."""

TOO_DEEP = (
    "Something in the request is nested too deep, such as the JSON in a past call's arguments: flatten it."
)
"""Message for Python's RecursionError, which vLLM's code raises at JSON within JSON."""

FLAG = re.compile(r"`?(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])(?:\.\w+)*`?")
"""A flag of vLLM's server in one of its messages."""

CONTEXT_LENGTH = ("maximum context length", "max_model_len", "maximum model length")
"""Texts of vLLM's errors when prompt and answer exceed the model's context length."""


NOT_COMPILED = re.compile(r"structural tag|json schema|grammar|xgrammar", re.IGNORECASE)
"""Text of vLLM's errors when it cannot make a grammar of what a request demands of the answer."""


def with_schema(error: BatonError, body: Any) -> BatonError:
    """Name the schema, and its keyword, of which vLLM could make no grammar; another error stays as it is."""
    if type(error) is not InvalidRequest or not NOT_COMPILED.search(error.message):
        return error
    found = list(_schemas(body))
    faulty = next(((*row, fault) for row in found if (fault := fault_of(row[2]))), None)
    if faulty is not None:
        param, name, _, fault = faulty
        of = f" of the tool '{name}'" if name is not None else ""
        return InvalidRequest(f"The schema{of} in '{param}' is no valid JSON schema: {fault}.", param=param)
    if found and error.param is None and "structural tag" in error.message:
        named = ", ".join(f"'{param}'" for param, _, _ in found)
        return InvalidRequest(
            f"The engine can make no grammar of a schema in {named}: make it simpler.", param=found[0][0]
        )
    return error


def _schemas(body: Any) -> Iterator[tuple[str, str | None, Any]]:
    """Yield the schemas of a request that an engine may compile: place, name of the tool, schema."""
    paths = (
        *(("response_format", "json_schema", "schema"), ("text", "format", "schema")),
        *(("output_config", "format", "schema"), ("structured_outputs", "json")),
    )
    for path in paths:
        found = body
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict):
            yield ".".join(path), None, found
    yield from _tools(body, "")


def _tools(holder: Any, place: str) -> Iterator[tuple[str, str | None, Any]]:
    """Yield the schemas of tools, also of those within a namespace."""
    tools = holder.get("tools") if isinstance(holder, dict) else None
    for at, tool in enumerate(tools if isinstance(tools, list) else ()):
        where = f"{place}tools[{at}]"
        if not isinstance(tool, dict):
            continue
        inner = tool.get("function")
        for each, path in ((tool, where), (inner, f"{where}.function")):
            for key in ("parameters", "input_schema"):
                if isinstance(each, dict) and isinstance(each.get(key), dict):
                    yield f"{path}.{key}", str(each.get("name")), each[key]
        yield from _tools(tool, f"{where}.")


def told(message: str) -> str:
    """Return a message of vLLM's as clients get it: scrubbed, and with Baton's settings in place of flags."""
    return FLAG.sub(_setting, scrub(message))


def _setting(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    if name in EngineSettings.model_fields:
        return f"the setting `engines.{name}`"
    if name in SERVING_OPTIONS:
        return f"the setting `engines.serving.{name}`"
    if name in ARGUMENTS:
        return f"the setting `engines.args.{name}`"
    return "an option that this gateway does not have"


def translate(error: BaseException, body: Any = None) -> BatonError:
    """Return the `BatonError` for an exception that vLLM raised; `InternalError` for an unknown one.

    Args:
        body: the request's, in which an invalid field is looked for; None: it is not known.
    """
    if isinstance(error, BatonError):
        return error
    if isinstance(error, RecursionError):
        return InvalidRequest(TOO_DEEP)
    if isinstance(error, ValidationError):
        of_an_answer = error.title.endswith(("Response", "StreamResponse", "Event"))
        return GenerationFailed() if of_an_answer else from_validation(error, body)
    if (image_error := _image_error(str(error))) is not None:
        return image_error
    for theirs, ours in TABLE:
        if isinstance(error, theirs):
            return _build(ours, error)
    if any(cls.__name__ == "TemplateError" for cls in type(error).__mro__):
        return InvalidRequest("The model's chat template refuses these messages: " + told(str(error)))
    return InternalError()


def _image_error(message: str) -> BatonError | None:
    if any(text in message for text in MISPLACED_IMAGES):
        return ImagesMisplaced(
            "The prompt has not one place for each of its images: send images in messages of the user, where "
            "the model's chat template has a place for them, and leave image placeholders out of texts.",
            param="messages",
        )
    if UNPROCESSED_IMAGE.search(message):
        return InvalidImage("The model's image processor cannot take one of these images; send another size.")
    return None


def _build(ours: type[BatonError], error: BaseException) -> BatonError:
    if not isinstance(error, UNFORESEEN) and issubclass(ours, InvalidRequest | NotFound | Unprocessable):
        message = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
        return client_error(ours, message, getattr(error, "parameter", None))
    return ours()


def client_error(ours: type[BatonError], message: str, param: str | None) -> BatonError:
    """Build a client error with vLLM's message, scrubbed."""
    text = told(message)
    if ours is InvalidRequest and any(word in text for word in CONTEXT_LENGTH):
        ours = ContextTooLong
    return ours(text, param=param)


def from_response(response: ErrorResponse) -> BatonError:
    """Return the `BatonError` for an `ErrorResponse` that a vLLM handler returned instead of raising."""
    error = response.error
    if error.code == HTTPStatus.NOT_FOUND:
        missing = ModelNotFound if error.param == "model" else NotFound
        return client_error(missing, error.message, error.param)
    if error.code == HTTPStatus.NOT_IMPLEMENTED:
        return OperationUnsupported(told(error.message))
    if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
        return EngineOverloaded()
    if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return GenerationFailed()
    return client_error(InvalidRequest, error.message, error.param)


def from_validation(error: ValidationError, body: Any = None) -> BatonError:
    """Build the error for a body that pydantic refuses: the invalid field, and how many more are.

    Args:
        body: what was validated; None: it is not known.
    """
    if error.error_count() <= MOST_FAULTS:
        first = error.errors(include_url=False, include_input=False)[0].get("ctx", {}).get("error")
        if isinstance(first, VLLMValidationError):
            return translate(first)
    found = invalid_field(error, body)
    return client_error(InvalidRequest, str(found), found.path or None)

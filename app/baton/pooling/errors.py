"""Turn an exception of a plugin into the error that its client gets."""

from __future__ import annotations

import re
import traceback
from pathlib import PurePath

import structlog
from pydantic import ValidationError

from baton.engines.scrub import scrub
from baton.errors import BatonError, InvalidRequest, PluginBusy, PluginFailed, PluginRefusal
from baton.errors.invalid_fields import invalid_field

log = structlog.get_logger("baton.pooling")

PLACES = 3
CODE = re.compile(r"[a-z][a-z0-9_]{0,39}")


def client_error(error: BaseException, plugin: str, step: str, *, at_input: bool) -> BatonError:
    """Turn an exception of a plugin into its client's error; log it where the plugin itself failed.

    Args:
        step: in which it was raised, for the log.
        at_input: whether the request was being parsed or prepared.
    """
    refused = refusal(error, at_input=at_input)
    if refused.status >= 500 and not refused.retryable:
        log.error("plugin_failed", plugin=plugin, step=step, cause=where(error))
        log.debug("plugin_failed", plugin=plugin, exc_info=error)
    return refused


def refusal(error: BaseException, *, at_input: bool) -> BatonError:
    """Map an exception of a plugin to a `BatonError`.

    An exception with an HTTP `status` and a `code` is answered with these. While the input is read, a
    `ValueError` is a 400 with its text, as in vLLM. Any other exception is a `plugin_failed` without its
    text, which may hold paths or another client's data.
    """
    if isinstance(error, BatonError):
        return error
    status, code = getattr(error, "status", None), getattr(error, "code", None)
    if isinstance(status, int) and isinstance(code, str) and CODE.fullmatch(code):
        return _with_status(error, status, code) or PluginFailed()
    if at_input and isinstance(error, ValidationError):
        return _validation(error)
    if at_input and isinstance(error, ValueError):
        return InvalidRequest(scrub(str(error)), param="data")
    return PluginFailed()


def _with_status(error: BaseException, status: int, code: str) -> BatonError | None:
    message = scrub(str(error))
    if status == 503:
        return PluginBusy(message, code=code)
    if not 400 <= status < 500:
        return None
    param = getattr(error, "param", None)
    return PluginRefusal(message, status=status, code=code, param=param if isinstance(param, str) else None)


def _validation(error: ValidationError) -> InvalidRequest:
    found = invalid_field(error)
    field = f"data.{found.path}" if found.path else "data"
    return InvalidRequest(scrub(f"{field}: {found.message}"), param=field[:200])


def where(error: BaseException) -> str:
    """Name the last frames of an exception for the log. Its text may hold a client's data: left out."""
    frames = traceback.extract_tb(error.__traceback__)[-PLACES:]
    places = [f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
    return f"{type(error).__name__} at {', from '.join(places)}" if places else type(error).__name__

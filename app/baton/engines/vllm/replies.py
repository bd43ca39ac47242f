"""Turn what vLLM's serving handlers return, stream and raise into the port's replies and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response
from structlog.typing import FilteringBoundLogger
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from baton.engines.port import Json, Operation, Reply, StreamReply, WholeReply
from baton.engines.vllm import handlers
from baton.engines.vllm.client import CURRENT_CALL, Call
from baton.engines.vllm.errors import UNFORESEEN, from_response, translate
from baton.errors import BatonError, GenerationFailed

CONTENT_HEADERS = ("metadata",)
"""Headers of vLLM's answers that describe their content: packed embeddings' ids, shapes and dtypes."""


class ReplyTranslator:
    """A translator of one engine's answers and errors.

    Args:
        log: the engine's log; errors that are not the client's fault are written there.
    """

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log

    def error(self, error: Exception, call: Call | None = None, body: Json | None = None) -> BatonError:
        """Translate an exception of vLLM's, and log it where the client did not cause it.

        Args:
            error: the exception.
            call: what vLLM worked on; None: it generates nothing.
            body: of the request; None: it is not known.
        """
        translated = translate(error, body)
        if isinstance(error, RecursionError) and call is not None and call.context.generated_tokens:
            translated = GenerationFailed()  # it was the model that nested too deep
        unforeseen = isinstance(error, UNFORESEEN)
        if unforeseen or (translated.status >= 500 and not translated.retryable):
            self._log.error("engine_call_failed", exc_info=error)
        return translated

    async def reply(self, operation: Operation, answer: Any, call: Call) -> Reply:
        """Translate what the handler of `operation` returned for `call`.

        Raises:
            BatonError: the handler returned vLLM's `ErrorResponse`.
        """
        if isinstance(answer, ErrorResponse):
            failure = call.failure or from_response(answer)
            if failure.status >= 500 and not failure.retryable:
                self._log.error("engine_call_failed", cause=answer.error.message)
            raise failure
        if isinstance(answer, handlers.HANDLERS[operation].response):
            if operation is Operation.RESPONSES:
                handlers.mark_cut(answer)
            body = answer.model_dump_json(**handlers.HANDLERS[operation].dump)
            return WholeReply(body.encode())
        if isinstance(answer, Response):
            return await _from_response(answer)
        return StreamReply(self._stream(operation, answer, call))

    async def _stream(self, operation: Operation, generator: Any, call: Call) -> AsyncIterator[str]:
        """Yield the handler's events; raise our own error in place of the text that vLLM would write."""
        CURRENT_CALL.set(call)
        async with aclosing(generator):
            try:
                async for event in handlers.events(operation, generator):
                    if call.failure is not None:
                        raise call.failure
                    if _is_error(event):
                        self._log.error("engine_stream_failed", cause=event)
                        raise GenerationFailed()
                    yield event
                    CURRENT_CALL.set(call)  # the next event may be taken by another task
            except BatonError:
                raise
            except (
                ValidationError,
                RecursionError,
                *UNFORESEEN,
            ) as error:  # midway in an answer: not the client's fault
                self._log.error("engine_stream_failed", exc_info=error)
                raise GenerationFailed() from error
            except Exception as error:  # the border to vLLM's generators, which raise anything at all
                raise self.error(error) from error
        if call.failure is not None:
            raise call.failure


def _is_error(event: str) -> bool:
    return event.startswith(('data: {"error"', "event: error"))


async def _from_response(response: Response) -> WholeReply:
    """Read a pooling handler's finished `Response`, which may be a streaming one, into one piece."""
    media_type = response.headers.get("content-type", "application/json")
    headers = {name: response.headers[name] for name in CONTENT_HEADERS if name in response.headers}
    if hasattr(response, "body_iterator"):
        parts = [part async for part in response.body_iterator]
        return WholeReply(b"".join(bytes(part) for part in parts), media_type, headers)
    return WholeReply(bytes(response.body), media_type, headers)

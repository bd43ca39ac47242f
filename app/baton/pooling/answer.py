"""One plugin request's answer, as JSON, files or a description; and the errors of its plugin."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from baton.errors import BatonError, PluginTimeout
from baton.pooling.processor import PluginProcessor
from baton.pooling.refusals import refusal, where
from baton.pooling.values import Description, ResultFile

log = structlog.get_logger("baton.pooling")

FORGET_WAIT_S = 1.0
"""Seconds that an answer waits for the plugin's `forget`, which goes on in the background."""


class PluginAnswer:
    """A plugin's answer to one request; the plugin keeps its files until `close` is called.

    Args:
        processor: the plugin's hooks.
        output: what the plugin's last hook returned.
        request_id: ours.
        deadline: until when the answer must be made, by the loop's clock.
        time_limit_s: the time limit that the deadline came from.
    """

    def __init__(
        self,
        processor: PluginProcessor,
        output: Any,
        request_id: str,
        *,
        deadline: float,
        time_limit_s: float,
    ) -> None:
        self._processor = processor
        self._output = output
        self._request_id = request_id
        self._deadline = deadline
        self._closed = False
        self.time_limit_s = time_limit_s

    async def data(self) -> Any:
        """Return the `data` of a JSON answer.

        Raises:
            BatonError: the plugin failed, or took too long.
        """
        return await self._step(self._processor.data(self._output))

    async def files(self) -> list[ResultFile]:
        """Return the answer as files; an empty list: the plugin makes none.

        Raises:
            BatonError: the plugin failed, or took too long.
        """
        files: list[ResultFile] = await self._step(self._processor.files(self._output))
        return files

    async def describe(self) -> Description:
        """Return the plugin's description of the answer; the request must have been run with `describe`.

        Raises:
            BatonError: the plugin failed, or took too long.
        """
        description: Description = await self._step(self._processor.describe(self._output))
        return description

    async def _step(self, step: Any) -> Any:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await step
        except TimeoutError:
            raise too_long(self.time_limit_s) from None
        except Exception as error:
            raise client_error(error, self._processor.name, "answer", at_input=False) from error

    async def close(self) -> None:
        """Have the plugin forget the request; a second call does nothing."""
        if not self._closed:
            self._closed = True
            await forget(self._processor, self._request_id)


def too_long(limit: float) -> PluginTimeout:
    """Return the error of a request that exceeded its time limit, in seconds."""
    return PluginTimeout(f"The request was not done within {limit:g} seconds.")


def client_error(error: BaseException, plugin: str, step: str, *, at_input: bool) -> BatonError:
    """Return the client's error for an exception of a plugin; log what is the plugin's own failure.

    Args:
        error: the exception.
        plugin: the plugin's name.
        step: in which it was raised, for the log.
        at_input: whether the request was being parsed or prepared.
    """
    refused = refusal(error, at_input=at_input)
    if refused.status >= 500 and not refused.retryable:
        log.error("plugin_failed", plugin=plugin, step=step, cause=where(error))
        log.debug("plugin_failed", plugin=plugin, exc_info=error)
    return refused


async def forget(processor: PluginProcessor, request_id: str) -> None:
    """Have the plugin forget a request, and wait for that at most `FORGET_WAIT_S`."""
    forgetting = asyncio.ensure_future(_forget(processor, request_id))
    await asyncio.wait({forgetting}, timeout=FORGET_WAIT_S)


async def _forget(processor: PluginProcessor, request_id: str) -> None:
    try:
        await processor.forget(request_id)
    except Exception as error:  # noqa: BLE001  # the border to the plugin; the request is over anyway
        log.error("plugin_failed", plugin=processor.name, step="forget", cause=where(error))

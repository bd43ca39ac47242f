"""Run scripts over an `httpx.AsyncClient`, on asyncio: the I/O of the async client."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import httpx

from baton_client.call import CHUNK_BYTES, Call, Pause, Reply, Script
from baton_client.errors import BadAnswer, ConnectionLost
from baton_client.retries import Retries
from baton_client.wire import Arrival, Options, lost_of, options_of

T = TypeVar("T")


class AsyncDriver:
    """Sends what scripts yield.

    Args:
        options: of the `httpx.AsyncClient`.
        retries: when calls are sent again.
        transport: what sends requests; None: httpx's own.
        most: bytes that an answer may have in memory.
    """

    def __init__(
        self, options: Options, retries: Retries, transport: httpx.AsyncBaseTransport | None, most: int
    ) -> None:
        self.retries = retries
        self._most = most
        self._http = httpx.AsyncClient(**options, transport=transport)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def run(self, script: Script[T]) -> T:
        """Do what a script yields until it returns; returns its result.

        Raises:
            BatonError: as the script says.
        """
        try:
            step = next(script)
            while True:
                try:
                    reply = await self._do(step)
                except (ConnectionLost, BadAnswer) as lost:
                    step = script.throw(lost)
                else:
                    step = script.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _do(self, step: Call[Any] | Pause) -> Reply | None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        arrival = Arrival(step, self._most)
        try:
            async with self._http.stream(**options_of(step, asynchronous=True)) as response:
                arrival.begin(response)
                async for piece in response.aiter_bytes(CHUNK_BYTES):
                    arrival.count(piece)
                    if arrival.to_file:
                        await asyncio.to_thread(arrival.write, piece)
                    else:
                        arrival.write(piece)
                    arrival.report()
                return arrival.end()
        except httpx.RequestError as error:
            raise lost_of(error, self._http.base_url, answered=arrival.begun) from error
        finally:
            arrival.close()

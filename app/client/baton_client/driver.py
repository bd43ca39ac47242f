"""Run calls and scripts over httpx, and make methods of the sync and the async client of them."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx

from baton_client.call import CHUNK_BYTES, Call, Pause, Reply, Script
from baton_client.errors import BadAnswer, ConnectionLost
from baton_client.retries import Retries
from baton_client.scripts import exchange
from baton_client.wire import Arrival, Options, lost_of, options_of

P = ParamSpec("P")
T = TypeVar("T")


class Driver:
    """Sends what scripts yield, over an `httpx.Client`.

    Args:
        transport: what sends requests; None: httpx's own.
        most: bytes that an answer may have in memory.
    """

    def __init__(
        self, options: Options, retries: Retries, transport: httpx.BaseTransport | None, most: int
    ) -> None:
        self.retries = retries
        self._most = most
        self._http = httpx.Client(**options, transport=transport)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def run(self, script: Script[T]) -> T:
        """Do what a script yields until it returns; returns its result, or raises its error."""
        try:
            step = next(script)
            while True:
                try:
                    reply = self._do(step)
                except (ConnectionLost, BadAnswer) as lost:
                    step = script.throw(lost)
                else:
                    step = script.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result

    def _do(self, step: Call[Any] | Pause) -> Reply | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        arrival = Arrival(step, self._most)
        try:
            with self._http.stream(**options_of(step, asynchronous=False)) as response:
                arrival.begin(response)
                for piece in response.iter_bytes(None if step.told else CHUNK_BYTES):
                    arrival.count(piece)
                    arrival.write(piece)
                    arrival.report()
                return arrival.end()
        except httpx.RequestError as error:
            raise lost_of(error, self._http.base_url, answered=arrival.begun) from error
        finally:
            arrival.close()


class AsyncDriver:
    """Sends what scripts yield, over an `httpx.AsyncClient` on asyncio; see `Driver`."""

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
        """Do what a script yields until it returns; returns its result, or raises its error."""
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
                async for piece in response.aiter_bytes(None if step.told else CHUNK_BYTES):
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


def blocking(write: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], T]:
    """Make a method of a sync client that sends the call that `write` returns, and reads its answer."""

    def method(client: Any, /, *args: P.args, **options: P.kwargs) -> T:
        driver: Driver = client._driver
        return driver.run(exchange(write(*args, **options), driver.retries))

    return _described(method, write)


def awaiting(write: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Make the method of an async client that `blocking` makes of a sync one."""

    async def method(client: Any, /, *args: P.args, **options: P.kwargs) -> T:
        driver: AsyncDriver = client._driver
        return await driver.run(exchange(write(*args, **options), driver.retries))

    return _described(method, write)


M = TypeVar("M", bound=Callable[..., Any])


def _described(method: M, write: Callable[..., Any]) -> M:
    """Give a method the documentation and the parameters of the function that writes its call."""
    signature = inspect.signature(write)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]  # `inspect` reads it
        parameters=[own, *signature.parameters.values()], return_annotation=inspect.Signature.empty
    )
    method.__name__, method.__doc__ = write.__name__, write.__doc__
    return method

"""Run scripts over an `httpx.Client`: the I/O of the sync client."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import httpx

from baton_client.call import CHUNK_BYTES, Call, Pause, Reply, Script
from baton_client.errors import BadAnswer, ConnectionLost
from baton_client.retries import Retries
from baton_client.wire import Arrival, Options, lost_of, options_of

T = TypeVar("T")


class Driver:
    """Sends what scripts yield.

    Args:
        options: of the `httpx.Client`.
        retries: when calls are sent again.
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
        """Do what a script yields until it returns; returns its result.

        Raises:
            BatonError: as the script says.
        """
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
                for piece in response.iter_bytes(CHUNK_BYTES):
                    arrival.count(piece)
                    arrival.write(piece)
                    arrival.report()
                return arrival.end()
        except httpx.RequestError as error:
            raise lost_of(error, self._http.base_url, answered=arrival.begun) from error
        finally:
            arrival.close()

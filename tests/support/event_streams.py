"""Follow `/v1/events` of a gateway in the background."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any, NamedTuple

from support.raw_requests import address, wait_for


class Told(NamedTuple):
    """One event as a client sees it."""

    id: str
    kind: str
    data: dict[str, Any]


class Following:
    """A client that follows a gateway's events until it leaves, or the stream ends.

    It speaks HTTP/1.0, whose answers end with their connection, so that nothing stands between the lines.

    Args:
        key: its API key; None: there are no keys.
        last: id of the last event that it got before.
    """

    def __init__(self, url: str, key: str | None = None, last: str | None = None) -> None:
        self.told: list[Told] = []
        self.comments = 0
        self.ended = False
        self._socket = socket.create_connection(address(url), timeout=60)
        lines = ["GET /v1/events HTTP/1.0", "Host: localhost"]
        lines += [f"Authorization: Bearer {key}"] if key else []
        lines += [f"Last-Event-ID: {last}"] if last else []
        self._socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        self._file = self._socket.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        self.headers: dict[str, str] = {}
        while (line := self._file.readline().decode().strip()) != "":
            name, _, value = line.partition(": ")
            self.headers[name.lower()] = value
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Following:
        assert self.status == 200, self._file.read()
        self._thread.start()
        wait_for(lambda: self.told, "the stream did not begin")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)
        self._file.close()
        self._socket.close()

    def refusal(self) -> dict[str, Any]:
        """The error of a stream that did not begin; the connection is closed."""
        with self._socket, self._file:
            found: dict[str, Any] = json.loads(self._file.read())["error"]
        return found

    def _read(self) -> None:
        event: dict[str, str] = {}
        with contextlib.suppress(OSError):
            while line := self._file.readline().decode():
                line = line.removesuffix("\n")
                if line.startswith(":"):
                    self.comments += 1
                elif line:
                    name, _, value = line.partition(": ")
                    event[name] = value
                elif event:
                    self.told.append(Told(event.get("id", ""), event["event"], json.loads(event["data"])))
                    event = {}
        self.ended = True

    @property
    def kinds(self) -> list[str]:
        return [each.kind for each in self.told]

    def wait_for(self, kind: str, count: int = 1) -> Told:
        """Wait for the event of a kind that is the `count`-th of it, and return it."""
        wait_for(lambda: self.kinds.count(kind) >= count, f"{count} of {kind} were not told")
        return [each for each in self.told if each.kind == kind][count - 1]

    def wait_for_state(self, engine: str, state: str) -> Told:
        """Wait until an engine is told to be in a state, and return the last such event."""

        def found() -> list[Told]:
            wanted = {"engine": engine, "state": state}
            return [each for each in self.told if wanted.items() <= each.data.items()]

        wait_for(found, f"'{engine}' was not told to be {state}")
        return found()[-1]

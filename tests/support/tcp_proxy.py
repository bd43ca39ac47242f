"""A proxy in front of a server that is slow, cuts connections, or acts once so many bytes have passed."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PIECE = 65536


@dataclass
class TcpProxy:
    """What passes between clients and a server.

    Attributes:
        target: port of the server.
        port: port of the proxy.
        delay_s: seconds that each piece of an answer is held back.
        cut: whether connections are ended, and new ones refused.
        silent: whether nothing passes, while connections stay open, as behind a firewall that drops packets.
        sent: bytes that went to the server.
        received: bytes that came from it.
    """

    target: int
    port: int = 0
    delay_s: float = 0.0
    cut: bool = False
    silent: bool = False
    sent: int = 0
    received: int = 0
    _after: tuple[str, int, Callable[[], None]] | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    def once(self, direction: str, count: int, action: Callable[[], None]) -> None:
        """Call an action, in the proxy's thread, once `count` more bytes were `sent` or `received`."""
        self._after = (direction, getattr(self, direction) + count, action)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = {writer}
        self._open.add(writer)
        try:
            if self.cut:
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
            writers.add(far_writer)
            self._open.add(far_writer)
            await asyncio.gather(
                self._pass(reader, far_writer, "sent"), self._pass(far_reader, writer, "received")
            )
        except OSError:
            pass
        finally:
            self._end(writers)
            self._open -= writers

    def end_all(self) -> None:
        """End all connections, in the proxy's thread."""
        self.silent = False
        self._end(self._open)

    def _end(self, writers: set[asyncio.StreamWriter]) -> None:
        for each in writers:
            each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        with contextlib.suppress(OSError):
            await self._pieces(reader, writer, direction)
        writer.transport.abort()

    async def _pieces(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str
    ) -> None:
        while piece := await reader.read(PIECE):
            setattr(self, direction, getattr(self, direction) + len(piece))
            if self._after is not None and self._after[0] == direction:
                _, count, action = self._after
                if getattr(self, direction) >= count:
                    self._after = None
                    action()
            if self.cut:
                return
            while self.silent:  # noqa: ASYNC110  # set by other threads
                await asyncio.sleep(0.01)
            if self.delay_s and direction == "received":
                await asyncio.sleep(self.delay_s)
            writer.write(piece)
            await writer.drain()


@contextmanager
def tcp_proxy(target: int, tls: ssl.SSLContext | None = None) -> Iterator[TcpProxy]:
    """Run a proxy in a thread of its own."""
    proxy, ready, over = TcpProxy(target), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, ssl=tls)
        proxy.port = server.sockets[0].getsockname()[1]
        ready.set()
        await over.wait()
        # asyncio forgets a socket that is being accepted as its server is closed
        while any("_accept" in str(each.get_coro()) for each in asyncio.all_tasks()):  # noqa: ASYNC110  # as above
            await asyncio.sleep(0)
        server.close()
        while left := asyncio.all_tasks() - {asyncio.current_task()}:  # also of what was accepted just now
            proxy.end_all()
            await asyncio.wait(left, timeout=0.02)
        await asyncio.sleep(0.02)  # their sockets are closed with the next round of the loop

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()

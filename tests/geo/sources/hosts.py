"""Real HTTP hosts on loopback that count who connects, and resolvers that say what a test wants."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from baton_geo.settings import GeoSettings

RASTER = b"II*\x00" + bytes(range(256)) * 40


class Handler(BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers.items())))
        self.server.pages.get(self.path.split("?")[0], missing)(self)

    def log_message(self, *args: Any) -> None:
        pass


Page = Callable[[Handler], None]


class Host(ThreadingHTTPServer):
    """One host.

    Attributes:
        connects: connections taken.
        asked: path and headers of each request.
        names: those TLS clients asked for.
        pages: what it answers at which path; else 404.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        super().__init__((address, port), Handler)
        self.connects = 0
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.names: list[str | None] = []
        self.pages: dict[str, Page] = {"/scene.tif": page(RASTER)}
        if tls is not None:
            tls.sni_callback = lambda _socket, name, _context: self.names.append(name)
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    @property
    def port(self) -> int:
        return self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connects += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what these tests are about."""


def page(body: bytes, status: int = 200, **headers: str) -> Page:
    def answer(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def missing(handler: Handler) -> None:
    page(b"", 404)(handler)


def redirect(location: str, **headers: str) -> Page:
    return page(b"", 302, location=location, **headers)


@contextmanager
def hosting(address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[Host]:
    host = Host(address, port, tls)
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield host
    finally:
        host.shutdown()
        host.server_close()
        thread.join()


@dataclass
class Names:
    """A resolver: each name's answers in turn, the last for good.

    Attributes:
        asked: every name it was asked for.
    """

    table: dict[str, Sequence[Sequence[str]]]
    asked: list[str] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self.table.get(host)
        if answers is None:
            raise OSError("no such name")
        return answers[min(self.asked.count(host), len(answers)) - 1]


def settings(spool: Path, *hosts: str, **more: Any) -> GeoSettings:
    spool.mkdir(exist_ok=True)
    return GeoSettings.model_validate({"allowed_hosts": hosts, "allow_http": True, "spool": spool, **more})


def left(spool: Path) -> list[str]:
    """The files in a spool folder."""
    return sorted(entry.name for entry in spool.iterdir())

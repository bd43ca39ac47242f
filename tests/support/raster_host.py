"""A web server on loopback that hands out rasters, redirects, and counts who connects."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


class RasterHost:
    """Serves `files` by path; a value that is a text is where it redirects to.

    Attributes:
        files: what is served.
        connects: how many connections came.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes | str] = {}
        self.connects = 0
        host = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host.connects += 1
                found = host.files.get(self.path)
                if isinstance(found, bytes):
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(found)))
                    self.end_headers()
                    self.wfile.write(found)
                    return
                self.send_response(404 if found is None else 302)
                if found is not None:
                    self.send_header("Location", found)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> RasterHost:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

"""A proxy in front of an S3 server that refuses, delays or changes what a test says."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Refusal = tuple[int, str]
"""Status and S3's code, such as `(403, "AccessDenied")`, or a whole body; KEY in it is the request's."""


@dataclass
class S3Proxy:
    """What happens to requests on their way.

    Attributes:
        endpoint: the proxy's address.
        refuse: says of a request's method and path how it is refused; None: it is passed on.
        delay_s: seconds that each request is held back.
        cut: bytes after which the bodies of answers end; None: they are whole.
        seen: methods and paths of the requests so far.
    """

    endpoint: str = ""
    refuse: Callable[[str, str], Refusal | None] = lambda _method, _path: None
    delay_s: float = 0.0
    cut: int | None = None
    seen: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def s3_proxy(endpoint: str) -> Iterator[S3Proxy]:
    """Run a proxy in front of a server; its clients keep their own `Host`, which their signatures cover."""
    proxy, target = S3Proxy(), urlsplit(endpoint)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            proxy.seen.append((self.command, self.path))
            came = time.monotonic()
            while time.monotonic() < came + proxy.delay_s:  # it may be ended
                time.sleep(0.01)
            if (refusal := proxy.refuse(self.command, self.path)) is not None:
                status, code = refusal
                text = code if code.startswith("<") else f"<Error><Code>{code}</Code></Error>"
                key = re.search(rb"<Key>(.*?)</Key>", body)
                self.answer(
                    status, text.replace("KEY", key[1].decode() if key else "").encode(), {"ETag": '"0"'}
                )
                return
            server = http.client.HTTPConnection(str(target.hostname), target.port, timeout=60)
            try:
                server.request(self.command, self.path, body, dict(self.headers))
                answer = server.getresponse()
                self.answer(answer.status, answer.read(), dict(answer.getheaders()))
            finally:
                server.close()

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = headers.get("Content-Length", len(body)) if self.command == "HEAD" else len(body)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body if proxy.cut is None else body[: proxy.cut])
                self.close_connection = proxy.cut is not None

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = pass_on  # http.server's names

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

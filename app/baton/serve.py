"""Run the gateway: take the ports, prepare the models, build the engines, serve, clean up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from baton.admission.api_keys import keyring_for
from baton.config.groups import EngineSettings
from baton.config.settings import Settings
from baton.engines.fleet import UP, Fleet
from baton.engines.process.orphan_reaper import OrphanReaper
from baton.errors import StartError
from baton.http.routes.page import page_files
from baton.http.uvicorn_server import Certificate, GatewayServer, certificate_of, url_of
from baton.models.catalog import FLOOD_TINY
from baton.prepare import prepare_fleet, refuse_conflicts
from baton.server import create_app
from baton.telemetry.logs import EngineOutput, configure_logs
from baton.telemetry.progress import PhaseProgress

BACKLOG = 2048


def serve(settings: Settings, reread: Callable[[], Settings] | None = None) -> None:
    """Run the gateway until it gets a signal to stop.

    Args:
        reread: reads the settings again, as they were read; None: they stay as they are.

    Raises:
        SettingsError: a setting cannot work.
        StartError: the gateway could not start; the message says why.
    """
    signal.signal(signal.SIGTERM, stop_at_once)
    keyring = keyring_for(settings)
    refuse_conflicts()
    certificate = certificate_of(settings)
    with (
        listen_for_clients(settings) as listener,
        listen_for_metrics(settings, keyed=keyring is not None) as metrics_listener,
        EngineOutput() as output,
        OrphanReaper() as reaper,
        contextlib.ExitStack() as opened,
    ):
        configure_logs(settings.log_level, settings.log_format, output.terminal)
        with PhaseProgress(output.terminal) as progress:
            fleet = prepare_fleet(
                settings,
                progress,
                reaper,
                tenants=keyring is not None,
                last_words=output.root_cause,
                opened=opened,
            )
            _run(
                settings,
                fleet,
                listener,
                metrics_listener,
                progress,
                certificate,
                reread,
                keyed=keyring is not None,
            )


def stop_at_once(_number: int, _frame: FrameType | None) -> None:
    """End the process on a signal during the start; a running server handles signals itself.

    Without a handler the first process of a container would not end, for the kernel drops signals that it
    does not handle.
    """
    raise SystemExit(0)


def listen(host: str, port: int, option: str) -> socket.socket:
    """Open a port before anything slow, so that a taken port is reported at once.

    Args:
        port: the port; 0 picks a free one.
        option: the option or setting of the port, for the message.

    Raises:
        StartError: the port is taken, or may not be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartError(
            f"Cannot listen on {host}:{port}: {error.strerror}. "
            f"Stop the process that listens there, or choose another port with {option}."
        ) from None
    # asyncio sets this only on its own sockets; without it every answer waits 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextlib.contextmanager
def listen_for_clients(settings: Settings) -> Iterator[socket.socket]:
    """Open the socket of the gateway: a Unix socket, or a port.

    Raises:
        StartError: it cannot be opened.
    """
    if settings.uds is None:
        with listen(settings.host, settings.port, "--port") as listener:
            yield listener
        return
    path = settings.uds.expanduser()
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_left_socket(path)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(
            f"Cannot listen on {path}: {error.strerror or error}. Choose another `uds`."
        ) from None
    try:
        with listener:
            yield listener
    finally:
        path.unlink(missing_ok=True)


def _remove_left_socket(path: Path) -> None:
    """Remove the Unix socket of a gateway that was killed.

    Raises:
        OSError: something listens there, or it is no socket.
    """
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise FileExistsError(0, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.connect(str(path))
        raise OSError(0, "another process listens there")
    path.unlink()


@contextlib.contextmanager
def listen_for_metrics(settings: Settings, *, keyed: bool) -> Iterator[socket.socket | None]:
    """Open the socket of `/metrics`; None: it has no port of its own."""
    if not settings.shared(keyed=keyed):
        yield None
        return
    with listen(settings.metrics.host, settings.metrics.port, "`metrics.port`") as listener:
        yield listener


def _run(
    settings: Settings,
    fleet: Fleet,
    listener: socket.socket,
    metrics_listener: socket.socket | None,
    progress: PhaseProgress,
    certificate: Certificate | None,
    reread: Callable[[], Settings] | None,
    *,
    keyed: bool,
) -> None:
    page = settings.ui.enabled and bool(page_files())

    def report(name: str, phase: str) -> None:
        (progress.done if phase == UP else progress.phase)(f"engine {name}", phase)

    def ready(url: str) -> None:
        progress.close()
        metrics = url if metrics_listener is None else url_of(metrics_listener)
        shown = f"{url}{settings.root_path}"
        text = welcome(shown, metrics, settings.engines, keyed=keyed, uds=settings.uds, page=page)
        progress.console.print(text, markup=False)

    app = create_app(
        settings,
        fleet,
        metrics_listener=metrics_listener,
        report=report,
        reread=reread,
    )
    server = GatewayServer(app, settings, ready, certificate)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, listener))
    if server.failure is not None:
        raise server.failure


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    await server.serve(sockets=[listener])


def welcome(
    url: str,
    metrics: str,
    engines: Sequence[EngineSettings],
    *,
    keyed: bool,
    uds: Path | None = None,
    page: bool = False,
) -> str:
    """Return the text shown at the start: commands to try, with a placeholder for a key if needed."""
    key = "YOUR_KEY" if keyed else ""
    where = url if uds is None else f"the Unix socket {uds}"
    chat_model = next((engine.name for engine in engines if engine.runner == "generate"), None)
    scene_model = next((engine.name for engine in engines if engine.model == FLOOD_TINY.name), None)
    parts = [f"\nBaton is ready on {where}, serving: {', '.join(engine.name for engine in engines)}"]
    if page and uds is None:
        parts.append(f"Open it in a browser: {url}/")
    if uds is not None:
        parts.append(f"Try it:\n  curl --unix-socket {uds} {url}/v1/models {_header(key)}".rstrip())
    elif chat_model is not None:
        parts.append(_try_chat(url, chat_model, key))
    if scene_model is not None and uds is None:
        parts.append(_try_scene(url, scene_model, key))
    parts.append(f"Documentation of the API: {url}/docs    metrics: {metrics}/metrics    stop: Ctrl-C\n")
    return "\n\n".join(parts)


def _header(key: str) -> str:
    return f"-H 'Authorization: Bearer {key}' " if key else ""


def _try_chat(url: str, model: str, key: str) -> str:
    question = {"role": "user", "content": "Name the capital of France."}
    body = json.dumps({"model": model, "messages": [question], "temperature": 0, "max_tokens": 64})
    return f"""Try it:
  curl {url}/v1/chat/completions {_header(key)}-H 'Content-Type: application/json' \\
    -d '{body}'

or in Python (pip install openai):
  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key or "none"}")
  answer = client.completions.create(model="{model}", prompt="The capital of France is", max_tokens=8)
  print(answer.choices[0].text)"""


def _try_scene(url: str, model: str, key: str) -> str:
    return f"""Where is the water? A made-up scene in, a mask and a picture of it out:
  {sys.executable} -m baton_geo.flood.scene scene.tif
  curl '{url}/pooling?model={model}' {_header(key)}-H 'Content-Type: image/tiff' \\
    --data-binary @scene.tif -o mask.tif
  curl '{url}/pooling?model={model}' {_header(key)}-H 'Content-Type: image/tiff' \\
    -H 'Accept: image/png' --data-binary @scene.tif -o preview.png"""

"""A gateway of the demo's own: `baton serve` in a process beside it, with two engines and two keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from baton.config.settings import Settings, variables
from baton.errors import StartError
from baton.telemetry.progress import PhaseProgress

START_WITHIN_S = 600
STOP_WITHIN_S = 40
READER, COLD = "reader", "others"
TENANTS = ("handoff", "text")
MEMORY = Path("/dev/shm")
ROOM_BYTES = 2 * 1024**3

HEAD = """\
host = "127.0.0.1"
port = 0
log_format = "json"
models_dir = {models}
cpu_threads = {threads}

[auth]
keys_file = {keys}

[metrics]
port = 0

[handoffs]
auto = "off"
store = {store}

"""
# float32, so that a prompt's answer does not depend on how much of it was prefilled at a time.
CONFIG = (
    HEAD
    + """\
[[engines]]
name = "{reader}"
model = "smollm2"
handoff = true
kv_cache_memory = "512MiB"
args = {{ dtype = "float32", max_model_len = 5120, enable_prefix_caching = true }}

[[engines]]
name = "{cold}"
model = "smollm2"
handoff = true
kv_cache_memory = "768MiB"
args = {{ dtype = "float32", max_model_len = 5120, enable_prefix_caching = false }}
"""
)

PHASE = re.compile(r"\[ *[\d.]+s\] (?P<name>[^:]+): (?P<text>.+)")
ARRIVED = ("ready", "imported", "files verified")
READY = re.compile(r"Baton is ready on (\S+),")
METRICS = re.compile(r" metrics: (\S+) ")
"""In the last line that a gateway prints when it is ready."""


@dataclass(frozen=True)
class OwnGateway:
    """A gateway that runs for the demo alone.

    Attributes:
        url: where it answers.
        metrics_url: where its metrics are.
        keys: an API key of each tenant.
    """

    url: str
    metrics_url: str
    keys: dict[str, str]


@contextlib.asynccontextmanager
async def own_gateway(
    settings: Settings, progress: PhaseProgress, template: str = CONFIG
) -> AsyncIterator[OwnGateway]:
    """Start a gateway, and end it with all it has written.

    Args:
        settings: the machine's: where embedded models are, and which cores may be used.
        progress: where its start is shown.
        template: of the settings file; what stands in braces is filled in.

    Raises:
        StartError: it did not start.
    """
    with tempfile.TemporaryDirectory(prefix="baton-demo-", dir=_roomy()) as name:
        config = Path(name) / "baton.toml"
        config.write_text(_config(settings, config.parent, template))
        keys = {tenant: await _key(tenant, config) for tenant in TENANTS}
        process = await _baton("serve", "--config", str(config), together=True)
        follower = Follower(progress)
        following = asyncio.create_task(follower.follow(process))
        try:
            url, metrics_url = await follower.ready()
            yield OwnGateway(url, metrics_url, keys)
        finally:
            await _stop(process, progress)
            await following


def _roomy() -> str | None:
    """Memory for the store, where there is some; None: wherever temporary files go."""
    roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM_BYTES
    return str(MEMORY) if roomy else None


def _config(settings: Settings, folder: Path, template: str = CONFIG) -> str:
    return template.format(
        models=json.dumps(str(settings.models_folder)),  # a JSON string is one of TOML's too
        threads=json.dumps(settings.cpu_threads),
        keys=json.dumps(str(folder / "keys.json")),
        store=json.dumps(f"file:{folder / 'handoffs'}"),
        reader=READER,
        cold=COLD,
    )


async def _baton(*arguments: str, together: bool) -> asyncio.subprocess.Process:
    """Run `baton` by the file's settings alone; beyond the terminal's Ctrl-C, which is ours to take."""
    unset = [f"--unset={variable}" for variable in variables()]
    return await asyncio.create_subprocess_exec(
        "env",
        *unset,
        sys.executable,
        "-m",
        "baton.cli",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if together else asyncio.subprocess.PIPE,
        start_new_session=True,
    )


async def _key(tenant: str, config: Path) -> str:
    process = await _baton("keys", "create", tenant, "--config", str(config), together=False)
    out, err = await process.communicate()
    if process.returncode:
        raise StartError(_last_words(err.decode(errors="replace").splitlines()))
    return out.decode().strip()


class Follower:
    """Reads what a starting gateway prints, to its end.

    Args:
        progress: shown its phases.
    """

    def __init__(self, progress: PhaseProgress) -> None:
        self._progress = progress
        self._lines: deque[str] = deque(maxlen=50)
        self._url = ""
        self._addresses: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

    async def follow(self, process: asyncio.subprocess.Process) -> None:
        """Read until the process closes its output, so that it never waits for us."""
        assert process.stdout is not None
        async for line in process.stdout:
            self._read(line.decode(errors="replace").rstrip())
        if not self._addresses.done():
            self._addresses.set_exception(StartError(_last_words(self._lines)))

    async def ready(self) -> tuple[str, str]:
        """The gateway's address and that of its metrics, once it has started.

        Raises:
            StartError: it ended, or took too long.
        """
        try:
            return await asyncio.wait_for(self._addresses, START_WITHIN_S)
        except TimeoutError:
            raise StartError(f"The gateway did not start within {START_WITHIN_S} s.") from None

    def _read(self, line: str) -> None:
        self._lines.append(line)
        if self._addresses.done():
            return
        if found := READY.search(line):
            self._url = found[1]
        elif self._url and (found := METRICS.search(line)):
            self._addresses.set_result((self._url, found[1]))
        elif phase := PHASE.fullmatch(line):
            told = self._progress.done if phase["text"] in ARRIVED else self._progress.phase
            told(phase["name"], phase["text"])


def _last_words(lines: deque[str] | list[str]) -> str:
    """Why the gateway ended: what it told its operator, in one line."""
    text = "\n".join(lines)
    told = text.rpartition("baton: ")[2] if "baton: " in text else ""
    return f"The gateway did not start: {' '.join(told.split()) or 'it gave no reason'}"


async def _stop(process: asyncio.subprocess.Process, progress: PhaseProgress) -> None:
    """End the gateway as its operator would; what does not end in time, and its engines, is killed."""
    if process.returncode is not None:
        return
    try:
        if process.stdout is not None and not process.stdout.at_eof():  # else it is ending by itself
            progress.console.print("Ending the gateway.", markup=False)
            process.terminate()
        await asyncio.wait_for(process.wait(), STOP_WITHIN_S)
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)

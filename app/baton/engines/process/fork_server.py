"""Fork engine cores from a process that has imported vLLM: 2.5 s instead of 13 for an engine's start.

Two thirds of an engine's start are vLLM's import in a new interpreter. The fork server imports it once, while
the gateway itself still imports, and does nothing else: it opens no device, starts no thread, and forks a
child for each message on its control socket. The child gets the gateway's environment of that moment, reads
the pickled process that `multiprocessing` would give to a spawned one, and runs it.

What the OpenMP runtime reads when it is loaded (`LD_PRELOAD`, `GOMP_CPU_AFFINITY` ...) stands in the fork
server's environment alone: in the gateway's it would bind the gateway's threads to the engines' cores.

Run as `python -m baton.engines.process.fork_server <descriptor> <module> ...`.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import importlib
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, context, forkserver, popen_forkserver, resource_tracker, spawn, util
from multiprocessing.reduction import ForkingPickler
from typing import Any

import structlog

READY = b"r"
"""Byte that the server sends once its modules are imported; `CUDA` in its place if they opened a GPU."""
CUDA = b"c"
MOST_DESCRIPTORS = 250
LENGTH = struct.Struct("!I")
NUMBER = struct.Struct("!q")
KILLED = -signal.SIGKILL
"""Exit code of a process that left none: it was killed."""
IMPORTED_OBJECTS = 50_000
"""So many new objects begin a collection while modules are imported, not 700: it takes a tenth less time."""
LINGERS_S = 10.0
"""Seconds that the server outlives its gateway: below it the orphan reaper finds what it forked last."""
REST_S = 5.0
"""Seconds before a server is replaced that ended before it was ready, as its replacement may too."""
LOOK_EVERY_S = 0.1
"""Seconds after which a thread that waits for the server can be interrupted."""
log = structlog.get_logger("baton.engine")


class ForkServerLost(OSError):
    """The fork server ended, or was stopped, before it had forked."""


class ForkServer:
    """The gateway's side of the fork server: a context within which engine cores can be forked.

    A server that is killed is replaced; engines that it had forked go on. One that ends before it was ready
    is not.

    Args:
        modules: modules to import before the first fork; one that cannot be imported is left out.
        private: variables of the server and of what it forks that this process must not have.

    Attributes:
        unusable: why engine cores cannot be forked; None: they can, as far as is known.
    """

    def __init__(self, modules: Sequence[str], private: Mapping[str, str]) -> None:
        self._modules = modules
        self._private = dict(private)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = self._was_ready = False
        self._closed = threading.Event()
        self.unusable: str | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> ForkServer:
        self._start()
        threading.Thread(target=self._replace_lost, name="fork-server", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the server; what it has forked goes on until its own end."""
        self._closed.set()
        with self._lock:
            process, control = self._process, self._control
        assert process is not None
        assert control is not None
        process.kill()  # it may be importing still, and has nothing to lose
        process.wait()
        control.close()

    def _start(self) -> None:
        self._ready = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno()), *self._modules],
                env=os.environ | self._private,  # what a spawned core would get, and more
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        if self._control is not None:
            self._control.close()
        self._control = ours

    def _replace_lost(self) -> None:
        while self.unusable is None:
            process = self._process
            assert process is not None
            process.wait()
            with self._lock, contextlib.suppress(OSError):
                if not self._closed.is_set():
                    self._await_ready()
            if not self._ready and self.unusable is None:
                self._closed.wait(REST_S)
            with self._lock:
                if self._closed.is_set() or self.unusable is not None:
                    return
                log.warning("fork_server_replaced", exit_code=process.returncode)
                with contextlib.suppress(OSError):  # e.g. too many processes; tried again after a rest
                    self._start()

    def usable(self) -> bool:
        """Wait until the server has imported its modules; return whether engine cores can be forked.

        The reason why not is in `unusable`.
        """
        with self._lock, contextlib.suppress(OSError):
            self._await_ready()
        return self.unusable is None

    def _await_ready(self) -> None:
        """Read what the server says once it has imported its modules."""
        assert self._control is not None
        if self._ready:
            return
        assert self._process is not None
        while not connection.wait([self._control], LOOK_EVERY_S):
            pass
        told = self._control.recv(1)
        if told == CUDA:
            self.unusable = "importing vLLM and its plugins opened a GPU, which no fork can use"
            self._process.kill()  # it would hold the GPU's memory
        if not told:
            if not self._was_ready:  # then none will be
                code = self._process.wait()
                self.unusable = f"its process ended with exit code {code} while it imported vLLM"
            raise ConnectionResetError("the fork server ended")
        self._ready = self._was_ready = True

    def fork(self, descriptors: Sequence[int]) -> int:
        """Fork a child and return its process id.

        Args:
            descriptors: its data pipe, its exit code's pipe, and what it inherits.

        Raises:
            ForkServerLost: the server has ended.
        """
        with self._lock:
            try:
                self._await_ready()
                return self._ask(descriptors)
            except OSError as error:
                raise ForkServerLost("the fork server ended while an engine was being started") from error

    def _ask(self, descriptors: Sequence[int]) -> int:
        assert self._control is not None
        assert self._process is not None
        variables = json.dumps(dict(os.environ)).encode()
        try:
            socket.send_fds(self._control, [LENGTH.pack(len(variables))], list(descriptors))
            self._control.sendall(variables)
            return int(NUMBER.unpack(_read(self._control, NUMBER.size))[0])
        except BaseException:  # interrupted, too: the next to ask would read the answer to this
            self._process.kill()
            raise


def _read(from_socket: socket.socket, size: int) -> bytes:
    """Read so many bytes from a socket.

    Raises:
        EOFError: it was closed before.
    """
    found = b""
    while len(found) < size:
        found += (more := from_socket.recv(size - len(found)))
        if not more:
            raise ConnectionResetError("the other end was closed")
    return found


@dataclass(frozen=True)
class Launch:
    """One process to fork.

    Attributes:
        begins: called before the server is asked for it.
        launched: called with its process id once it runs.
    """

    server: ForkServer
    begins: Callable[[], None]
    launched: Callable[[int], None]


CURRENT: contextvars.ContextVar[Launch | None] = contextvars.ContextVar("launch", default=None)
"""The launch that a `ForkContext` of this thread is used for."""


class ForkedPopen(popen_forkserver.Popen):
    """A process that a `ForkServer` forked: what `multiprocessing` starts, watches and waits for.

    The sentinel is the process's own descriptor, so that it tells its end even after the server's.
    """

    method = "spawn"  # what the process is pickled as

    def _launch(self, process_obj: Any) -> None:
        launch = CURRENT.get()
        assert launch is not None
        data = spawn.get_preparation_data(process_obj._name)
        for name in ("init_main_from_name", "init_main_from_path"):
            data.pop(name, None)  # what runs is vLLM's; the gateway's main module is not imported again
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            ForkingPickler(buffer).dump(data)
            ForkingPickler(buffer).dump(process_obj)
        finally:
            context.set_spawning_popen(None)
        data_r, data_w = os.pipe()
        code_r, code_w = os.pipe()
        os.set_blocking(code_r, False)  # what the child forked itself may hold the other end
        try:
            tracker = resource_tracker.getfd()
            assert tracker is not None  # it runs now
            inherited = self._fds  # type: ignore[attr-defined]  # of its base, and not in typeshed
            launch.begins()
            self.pid = launch.server.fork([data_r, code_w, tracker, *inherited])
            self.sentinel = os.pidfd_open(self.pid)  # it waits for its data: it is there
        except BaseException:
            os.close(data_w)
            os.close(code_r)
            raise
        finally:
            os.close(data_r)
            os.close(code_w)
        self._code = code_r
        alive = os.dup(data_w)  # the child sees this process's end when it closes
        self.finalizer = util.Finalize(self, _close, (alive, self.sentinel, code_r))
        with open(data_w, "wb") as file:
            file.write(buffer.getbuffer())
        launch.launched(self.pid)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            code = b""
            with contextlib.suppress(BlockingIOError):
                code = os.read(self._code, NUMBER.size)
            self.returncode = NUMBER.unpack(code)[0] if len(code) == NUMBER.size else KILLED
        return self.returncode

    def _send_signal(self, sig: int) -> None:
        """Send it to this very process: the kernel may give the id of an ended one to another."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, sig)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class ForkedProcess(context.SpawnProcess):
    """A process of a `ForkContext`."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return ForkedPopen(process_obj)


class ForkContext(context.SpawnContext):
    """A `multiprocessing` context whose processes the `CURRENT` server forks."""

    Process = ForkedProcess


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules inside: they are no garbage, and collections do not go through them, then or later.

    vLLM's take half a second to go through, in which a gateway answers nobody; and children of a fork share
    the memory of what no collection marks.
    """
    usual = gc.get_threshold()
    gc.set_threshold(IMPORTED_OBJECTS)
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*usual)


def main() -> None:
    """Import the modules named on the command line, then fork a child for each message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the gateway's to act on
    with socket.socket(fileno=int(sys.argv[1])) as control:
        with importing():
            for name in sys.argv[2:]:
                with contextlib.suppress(ImportError):  # e.g. a model of another platform
                    importlib.import_module(name)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
        if (titles := sys.modules.get("setproctitle")) is not None:
            titles.getproctitle()  # finds the title's memory, before a child changes its environment
        with contextlib.suppress(OSError):  # the gateway has ended
            control.sendall(CUDA if _cuda_is_open() else READY)
            while True:
                _fork_one(control)
    time.sleep(LINGERS_S)


def _cuda_is_open() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _fork_one(control: socket.socket) -> None:
    head, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, MOST_DESCRIPTORS)
    if len(head) < LENGTH.size:
        raise ConnectionResetError("the gateway closed the control socket")
    variables = json.loads(_read(control, LENGTH.unpack(head)[0]))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            control.close()
            code = _run(descriptors, variables)
        except BaseException:  # noqa: BLE001  # the child's border: printed, as by an interpreter
            sys.excepthook(*sys.exc_info())
        finally:
            _flush()
            with contextlib.suppress(OSError):
                os.write(descriptors[1], NUMBER.pack(code))
            os._exit(code)
    for descriptor in descriptors:
        os.close(descriptor)
    control.sendall(NUMBER.pack(pid))


def _run(descriptors: Sequence[int], variables: Mapping[str, str]) -> int:
    """Run the process whose pickled form comes through the data pipe; return its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, _, tracker, *inherited = descriptors
    private = {name: value for name, value in os.environ.items() if name not in variables}
    os.environ.clear()
    os.environ.update({**variables, **private})
    forkserver._forkserver._inherited_fds = inherited  # type: ignore[attr-defined]  # where they are looked for
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]  # one for the whole gateway
    return spawn._main(data, os.dup(data))  # as `multiprocessing` runs its own


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


if __name__ == "__main__":
    main()

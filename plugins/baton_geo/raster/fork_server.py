"""Fork, watch and reap raster children: `python -m baton_geo.raster.fork_server <descriptor>`.

The process has one thread and has loaded the raster libraries, so that a child starts in milliseconds. It
reads no raster. Each request on its control socket is one byte with descriptors: the child's socket, a
lifeline, and the files of the raster. When the gateway closes its end of the lifeline, the child is killed;
when the child has ended, its wait status (`<i`) is sent on the lifeline. When the gateway closes the control
socket, the children are killed and the process ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import rasterio
from rasterio._env import set_gdal_config

from baton_geo.raster import sandbox
from baton_geo.raster.child import Child
from baton_geo.raster.messages import STATUS

READY = b"R"
DESCRIPTORS = 253  # that Linux passes in one message


@dataclass(frozen=True)
class ForkedChild:
    """A child that was not reaped yet.

    Attributes:
        alive: read end of a pipe whose write end only the child holds; it becomes readable when the child
            ends.
    """

    pid: int
    alive: int
    lifeline: socket.socket


def drop_drivers() -> None:
    """Remove all of GDAL's drivers but those of `sandbox.DRIVERS`.

    GDAL skips drivers only while it registers them, once in a process, so a forked process lists them first.

    Raises:
        RuntimeError: other drivers are left.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with rasterio.Env() as every:
            os.write(writing, ",".join(set(every.drivers()) - sandbox.DRIVERS).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        others = pipe.read().decode()
    os.waitpid(pid, 0)
    set_gdal_config("GDAL_SKIP", others)
    with rasterio.Env() as left:
        if set(left.drivers()) - sandbox.DRIVERS:
            raise RuntimeError("GDAL's other drivers could not be removed")


class ForkServer:
    """The loop that forks, watches and reaps children; `control` is the socket to the gateway."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.poll()
        self._on_event: dict[int, Callable[[], None]] = {}
        self._children: dict[int, ForkedChild] = {}
        self._pid = os.getpid()

    def run(self) -> None:
        """Serve until the control socket closes."""
        self._watch(self._control.fileno(), self._fork_child)
        try:
            self._control.sendall(READY)
        except BrokenPipeError:  # the gateway has closed it already
            return
        while True:
            for descriptor, _ in self._poll.poll():
                react = self._on_event.get(descriptor)
                if react is not None:
                    react()

    def _watch(self, descriptor: int, react: Callable[[], None]) -> None:
        self._on_event[descriptor] = react
        self._poll.register(descriptor, select.POLLIN)

    def _unwatch(self, descriptor: int) -> None:
        if self._on_event.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _fork_child(self) -> None:
        try:
            byte, descriptors, _, _ = socket.recv_fds(self._control, 1, DESCRIPTORS)
        except ConnectionResetError:  # the gateway closed it before it read READY
            self._end()
        if not byte:
            self._end()
        if len(descriptors) < 3:
            raise RuntimeError("a request must have three descriptors")
        sock, lifeline, *rasters = descriptors
        alive, held_by_child = os.pipe()
        try:
            pid = os.fork()
        except OSError:  # too many processes: the gateway sees the sockets close
            for descriptor in (*descriptors, alive, held_by_child):
                os.close(descriptor)
            return
        if not pid:
            self._run_child(sock, rasters, held_by_child)
        for descriptor in (sock, *rasters, held_by_child):
            os.close(descriptor)
        child = ForkedChild(pid, alive, socket.socket(fileno=lifeline))
        self._children[pid] = child
        self._watch(alive, lambda: self._reap(child))
        self._watch(lifeline, lambda: self._kill(child))

    def _end(self) -> NoReturn:
        """Kill and reap all children: nobody else does where process 1 is not an init."""
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
        for child in self._children.values():
            os.waitpid(child.pid, 0)
        sys.exit(0)

    def _kill(self, child: ForkedChild) -> None:
        """Kill a child whose lifeline was closed; until it is reaped, its process id is not reused."""
        self._unwatch(child.lifeline.fileno())
        os.kill(child.pid, signal.SIGKILL)

    def _reap(self, child: ForkedChild) -> None:
        os.kill(child.pid, signal.SIGKILL)  # a child may close its end of the pipe and not end
        _, status = os.waitpid(child.pid, 0)
        del self._children[child.pid]
        self._unwatch(child.alive)
        self._unwatch(child.lifeline.fileno())
        os.close(child.alive)
        with contextlib.suppress(OSError):  # the gateway may have closed it
            child.lifeline.send(STATUS.pack(status), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        child.lifeline.close()

    def _run_child(self, sock: int, rasters: list[int], held_by_child: int) -> None:
        """Run the child until it ends; never returns."""
        try:
            sandbox.die_with_parent(self._pid)
            _close_all_but({sock, *rasters, held_by_child})
            with socket.socket(fileno=sock) as gateway:
                Child(gateway, rasters).serve()
        finally:
            os._exit(0)


def _close_all_but(kept: set[int]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    last = 2
    for descriptor in sorted(kept):
        os.closerange(last + 1, descriptor)
        last = descriptor
    os.closerange(last + 1, 1 << 30)


def main() -> None:
    """Run the fork server on the control socket whose descriptor the command line names."""
    drop_drivers()
    gc.freeze()  # keep the memory of loaded modules shared between the children
    with socket.socket(fileno=int(sys.argv[1])) as control:
        ForkServer(control).run()


if __name__ == "__main__":
    main()

"""The process that raster children are forked from: `python -m baton_geo.raster.fork_server <descriptor>`.

It has one thread and the raster libraries loaded, so that a child starts in milliseconds. It reads no raster.
Each request on its control socket is one byte with three descriptors: the child's socket, the raster, and a
leash. When the gateway lets go of the leash the child is killed; when the child has ended, its wait status
(`<i`) is sent on the leash. When the gateway lets go of the control socket all ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import rasterio
from rasterio._env import set_gdal_config

from baton_geo.raster import sandbox
from baton_geo.raster.child import Child

STATUS = struct.Struct("<i")
READY = b"R"


@dataclass(frozen=True)
class Charge:
    """A child under way.

    Attributes:
        pid: of the child.
        pulse: read end of a pipe the child alone holds the other end of: it closes when the child ends.
        leash: to the gateway.
    """

    pid: int
    pulse: int
    leash: socket.socket


def drop_drivers() -> None:
    """Leave GDAL the drivers we use, and no others.

    Drivers are skipped while they are registered, and that happens once in a process; so another one is asked
    which there are.
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


class Nursery:
    """Forks, watches and buries children.

    Args:
        control: to the gateway.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.poll()
        self._on_event: dict[int, Callable[[], None]] = {}
        self._charges: dict[int, Charge] = {}
        self._pid = os.getpid()

    def run(self) -> None:
        """Serve until the control socket closes."""
        self._watch(self._control.fileno(), self._give_birth)
        try:
            self._control.sendall(READY)
        except BrokenPipeError:  # the gateway has no use for us any more
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

    def _give_birth(self) -> None:
        try:
            byte, descriptors, _, _ = socket.recv_fds(self._control, 1, 3)
        except ConnectionResetError:  # the gateway let go before it had read that we are ready
            self._end()
        if not byte:
            self._end()
        if len(descriptors) != 3:
            raise RuntimeError("a request without its descriptors")
        sock, raster, leash = descriptors
        pulse, beating = os.pipe()
        try:
            pid = os.fork()
        except OSError:  # no room for another process: the gateway sees the sockets close
            for descriptor in (*descriptors, pulse, beating):
                os.close(descriptor)
            return
        if not pid:
            self._live(sock, raster, beating)
        for descriptor in (sock, raster, beating):
            os.close(descriptor)
        charge = Charge(pid, pulse, socket.socket(fileno=leash))
        self._charges[pid] = charge
        self._watch(pulse, lambda: self._bury(charge))
        self._watch(leash, lambda: self._kill(charge))

    def _end(self) -> NoReturn:
        """Kill and reap: nobody else may do it where process 1 is no init."""
        for charge in self._charges.values():
            os.kill(charge.pid, signal.SIGKILL)
        for charge in self._charges.values():
            os.waitpid(charge.pid, 0)
        sys.exit(0)

    def _kill(self, charge: Charge) -> None:
        """The gateway let go; the child is not reaped yet, so its number is still its own."""
        self._unwatch(charge.leash.fileno())
        os.kill(charge.pid, signal.SIGKILL)

    def _bury(self, charge: Charge) -> None:
        os.kill(charge.pid, signal.SIGKILL)  # a child that closed its end of the pipe need not have ended
        _, status = os.waitpid(charge.pid, 0)
        del self._charges[charge.pid]
        self._unwatch(charge.pulse)
        self._unwatch(charge.leash.fileno())
        os.close(charge.pulse)
        with contextlib.suppress(OSError):  # nobody may want to know any more
            charge.leash.send(STATUS.pack(status), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        charge.leash.close()

    def _live(self, sock: int, raster: int, beating: int) -> None:
        """The child's whole life; never returns."""
        try:
            sandbox.die_with_parent(self._pid)
            _close_all_but({sock, raster, beating})
            with socket.socket(fileno=sock) as line:
                Child(line, raster).serve()
        finally:
            os._exit(0)


def _close_all_but(kept: set[int]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 2)
    last = 2
    for descriptor in sorted(kept):
        os.closerange(last + 1, descriptor)
        last = descriptor
    os.closerange(last + 1, 1 << 30)


def main() -> None:
    """Run the nursery on the descriptor named on the command line."""
    drop_drivers()
    gc.freeze()  # what is loaded stays shared between the children
    with socket.socket(fileno=int(sys.argv[1])) as control:
        Nursery(control).run()


if __name__ == "__main__":
    main()

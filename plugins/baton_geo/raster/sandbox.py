"""Confine a child: no other files, no network, limited memory and time.

Kernel interfaces: prctl(2); Landlock, https://docs.kernel.org/userspace-api/landlock.html, used where the
kernel has it, in addition to the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton_geo.settings import GeoLimits

# Options of GDAL, PROJ and others: with two more variables, the fork server's whole environment.
QUIET_LIBRARIES = {
    "CPL_VSIL_CURL_ALLOWED_FILENAME": "",  # no address is allowed
    "GDAL_CACHEMAX": "64",  # MB: what a sample of a scene decoded is still there when its rows are read
    "GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR",  # no file beside the raster is looked for
    "GDAL_GEOREF_SOURCES": "INTERNAL",
    "GDAL_NUM_THREADS": "1",
    "GDAL_PAM_ENABLED": "NO",  # no .aux.xml
    "GTIFF_IGNORE_READ_ERRORS": "NO",
    "GTIFF_VIRTUAL_MEM_IO": "NO",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PROJ_NETWORK": "OFF",
}
# JP2OpenJPEG reads, COG writes only; Memory holds polygons, no file
DRIVERS = frozenset({"GTiff", "JP2OpenJPEG", "COG", "MEM", "Memory"})
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system call numbers, the same on every architecture
VERSION_FLAG, PATH_BENEATH = 1, 1
EXECUTE, WRITE, READ, READ_FOLDER, REMOVE, MAKE, TRUNCATE = (
    1 << 0,
    1 << 1,
    1 << 2,
    1 << 3,
    1 << 5,
    1 << 8,
    1 << 14,
)
RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 5: 16}  # Landlock version: number of file rights since then
CONNECT_AND_BIND, NETWORK_VERSION = 0b11, 4
SIGNALS_AND_SOCKETS, SCOPE_VERSION = 0b11, 6
WRITE_SLACK = 64 * 1024 * 1024


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def limit_resources(limits: GeoLimits, files: int = 1) -> None:
    """Cap memory, CPU time, open files and wall time of this process, which reads a number of files."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    space = pages * resource.getpagesize() + int(limits.memory)
    seconds = math.ceil(limits.seconds) + 1
    _limit(resource.RLIMIT_AS, space)
    resource.setrlimit(
        resource.RLIMIT_CPU, (seconds, seconds + 2)
    )  # SIGXCPU comes first: the gateway recognises it
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, 62 + 2 * files)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(min(seconds + 5, 2**31 - 1))
    with contextlib.suppress(OSError):  # the kernel kills this process first when memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")


@contextlib.contextmanager
def limit_opening(seconds: float) -> Iterator[None]:
    """End this process by SIGPROF when the body takes more processor time than `seconds`.

    Wall time would refuse sound rasters on a busy machine.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_writing(pixels: int, bytes_each: int) -> None:
    """Cap the size of the files this process writes."""
    _limit(resource.RLIMIT_FSIZE, 2 * pixels * bytes_each + WRITE_SLACK)


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def confine_files(rasters: int | Sequence[int], folder: Path) -> bool:
    """Restrict this process by Landlock to its rasters, one folder for writing, its own program, and no TCP.

    Returns:
        False if the kernel is older than 5.13 or has Landlock switched off.
    """
    call = ctypes.CDLL(None).syscall
    version = int(call(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION_FLAG))
    if version < 1:
        return False
    rights = max(count for since, count in RIGHTS_BY_VERSION.items() if since <= version)
    handled = (1 << rights) - 1
    attributes = struct.pack(
        "<QQQ",
        handled,
        CONNECT_AND_BIND if version >= NETWORK_VERSION else 0,
        SIGNALS_AND_SOCKETS if version >= SCOPE_VERSION else 0,
    )
    length = 24 if version >= SCOPE_VERSION else 16 if version >= NETWORK_VERSION else 8
    ruleset = int(call(CREATE_RULESET, attributes, ctypes.c_size_t(length), 0))
    if ruleset < 0:
        return False
    for raster in (rasters,) if isinstance(rasters, int) else rasters:
        _allow(ruleset, raster, READ)
    for root in _program_folders():
        _allow_path(ruleset, root, EXECUTE | READ | READ_FOLDER)
    _allow_path(ruleset, folder, (WRITE | READ | READ_FOLDER | REMOVE | MAKE | TRUNCATE) & handled)
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    done = call(RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return bool(done)


def _program_folders() -> list[Path]:
    """Return the folders of modules and libraries that may be loaded late, and of PROJ's tables.

    Some installers make a package, or each of its files, a link to a folder outside of the environment.
    """
    roots = {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", *sys.path} - {"", "/"}
    loaded = [module for name, module in tuple(sys.modules.items()) if "." not in name]
    files = [module.__file__ for module in loaded if hasattr(module, "__path__") and module.__file__]
    linked = {os.path.dirname(real) for file in files if (real := os.path.realpath(file)) != file}
    return [path for root in sorted(roots | linked) if (path := Path(root)).is_dir()]


def _allow_path(ruleset: int, path: Path, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    _allow(ruleset, descriptor, rights)
    os.close(descriptor)


def _allow(ruleset: int, descriptor: int, rights: int) -> None:
    rule = struct.pack("<Qi", rights, descriptor)  # packed: no padding at the end
    ctypes.CDLL(None).syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0)

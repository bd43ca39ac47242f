"""Building images with buildah and running them with crun, where there is no container engine.

Both keep what they make where `CONTAINERS_STORAGE_CONF` says; layers that are there are used again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
BASE = "localhost/baton-test:base"
TOOLS = ("buildah", "crun", "debootstrap", "unshare")
BUILD_S = 3000
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

OWN_STREAMS: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
"""crun hands the streams it is given to the container's user: never this machine's /dev/null."""


def reason_not_to() -> str:
    """Why no image can be built and run here; empty: it can."""
    if os.geteuid() != 0:
        return "building an image without a container engine needs root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return (
        f"not installed: {', '.join(absent)} (Debian: apt-get install buildah crun debootstrap)"
        if absent
        else ""
    )


def buildah(*arguments: str | Path, timeout: float = 120) -> str:
    """What it prints; a failure shows its last lines."""
    command = ["buildah", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


def make_base(folder: Path) -> None:
    """A small Debian with Python, unless there is one from an earlier run."""
    if BASE in buildah("images", "--format", "{{.Name}}:{{.Tag}}").splitlines():
        return
    tree = folder / "debian"
    wanted = "python3,python3-venv,ca-certificates"
    command = ["debootstrap", "--variant=minbase", f"--include={wanted}", "bookworm", tree]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=400)
    subprocess.run(["tar", "-C", tree, "-cf", folder / "debian.tar", "."], check=True)
    shutil.rmtree(tree)
    container = buildah("from", "scratch")
    buildah("add", container, folder / "debian.tar", "/")
    buildah("commit", "--rm", container, BASE)
    (folder / "debian.tar").unlink()


def build(target: str, folder: Path, *, index_only: bool = False, **arguments: str) -> str:
    """Build one target of the Dockerfile; its image's name.

    Args:
        target: of the Dockerfile.
        folder: for what the build reads beside it.
        index_only: take no package from this machine's own folders, where builds for its processor lie.
        arguments: of the build, on top of the base.
    """
    name = f"localhost/baton-test:{target}"
    index = {name: value for name, value in os.environ.items() if name == "TORCH_INDEX" and value}
    all_arguments = {"BASE_IMAGE": BASE} | index | arguments
    given = [f"--build-arg={key}={value}" for key, value in all_arguments.items()]
    tags = ["--target", target, "--tag", name, "--file", ROOT / "Dockerfile"]
    how = ["--format", "docker", "--isolation", "chroot", "--layers"]
    buildah("bud", *how, *tags, *given, *_pip_here(folder, index_only=index_only), ROOT, timeout=BUILD_S)
    return name


def _pip_here(folder: Path, *, index_only: bool) -> list[str]:
    """What pip is told on this machine the build is told too: where packages are, and whom to trust."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    told = {
        key: value
        for key, value in re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", listed.stdout, re.MULTILINE)
        if key in ("index-url", "extra-index-url", "find-links", "trusted-host")
    }
    if index_only:
        told = {key: value for key, value in told.items() if key not in ("extra-index-url", "find-links")}
    local = {
        Path(*Path(place).parts[:3])
        for place in re.findall(r"(?<![:/\w])/[\w./-]+|(?<=file://)/[^\s]+", " ".join(told.values()))
    }
    if CERTIFICATES.exists():
        told["cert"] = str(CERTIFICATES)
        local.add(CERTIFICATES)
    settings = folder / "pip.conf"
    settings.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in told.items()))
    mounts = [f"--volume={path}:{path}:ro" for path in sorted(local) if path.exists()]
    return [*mounts, f"--volume={settings}:/etc/pip.conf:ro"]


def config(image: str) -> dict[str, Any]:
    """What the image says of how it is run."""
    inspected = json.loads(buildah("inspect", "--type", "image", image))
    found: dict[str, Any] = inspected["Docker"]["config"]
    return found


def size(image: str) -> int:
    """Bytes of all its layers, unpacked."""
    listed = json.loads(buildah("images", "--json", image))
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "B": 1}
    number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", listed[0]["size"]).groups()  # type: ignore[union-attr]  # its form
    return int(float(number) * units[unit.upper()])


class Container:
    """An image that runs as its own user, without capabilities, on a root that is read-only.

    Args:
        image: its name.
        folder: for its settings and its output.
        environment: on top of the image's.
        binds: folders of this machine, by where they are in there.
        arguments: in place of the image's command.
        shared_memory: size of /dev/shm, as tmpfs takes it.
    """

    def __init__(
        self,
        image: str,
        folder: Path,
        *,
        environment: dict[str, str] | None = None,
        binds: dict[str, Path] | None = None,
        arguments: list[str] | None = None,
        shared_memory: str = "3g",
    ) -> None:
        self._config = config(image)
        self._image = image
        self._bundle = folder / "bundle"
        self._state = folder / "crun"
        self._name = f"baton-test-{os.getpid()}"
        self._environment = [*self._config["Env"], *(f"{k}={v}" for k, v in (environment or {}).items())]
        self._binds = binds or {}
        self._arguments = [
            *(self._config.get("Entrypoint") or []),
            *(arguments or self._config.get("Cmd") or []),
        ]
        self._shared_memory = shared_memory
        self.output = folder / "container.log"

    def __enter__(self) -> Container:
        self._container = buildah("from", "--pull-never", self._image)
        root = buildah("mount", self._container)
        self._bundle.mkdir(parents=True)
        (self._bundle / "config.json").write_text(json.dumps(self._spec(root)))
        self._log = open(self.output, "w")  # closed in __exit__
        # crun does without cgroups where it finds none; on a machine of an odd layout it would refuse.
        command = (
            "umount -R -l /sys/fs/cgroup 2>/dev/null; mount -t tmpfs none /sys/fs/cgroup; exec "
            + " ".join(
                [
                    "crun",
                    "--cgroup-manager=disabled",
                    f"--root={self._state}",
                    "run",
                    f"--bundle={self._bundle}",
                    self._name,
                ]
            )
        )
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.signal("KILL")
            self.process.wait(30)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._log.close()
        buildah("umount", self._container)
        buildah("rm", self._container)

    @property
    def log(self) -> str:
        return self.output.read_text(errors="replace")

    def signal(self, name: str) -> None:
        """Send a signal to its first process, as `docker stop` does."""
        subprocess.run(["crun", f"--root={self._state}", "kill", self._name, name], check=True)

    def run(self, command: list[str]) -> int:
        """A command in there, as `HEALTHCHECK` runs them; its exit status."""
        crun = ["crun", "--cgroup-manager=disabled", f"--root={self._state}"]
        as_user = ["exec", "--user", self._config["User"], self._name, *command]
        done = subprocess.run([*crun, *as_user], check=False, timeout=60, **OWN_STREAMS)
        return done.returncode

    @property
    def health_check(self) -> list[str]:
        """The image's `HEALTHCHECK`."""
        kind, *command = self._config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return command

    def memory(self) -> int:
        """Bytes all its processes hold, what they share counted once."""
        held = 0
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # raster processes come and go
                held += process.memory_full_info().pss
        return held

    def _spec(self, root: str) -> dict[str, Any]:
        """The OCI runtime specification, version 1.0.2."""
        user, group = (int(number) for number in self._config["User"].split(":"))
        nothing: dict[str, list[str]] = {
            kind: [] for kind in ("bounding", "effective", "permitted", "inheritable", "ambient")
        }
        process = {
            "user": {"uid": user, "gid": group},
            "args": self._arguments,
            "env": self._environment,
            "cwd": self._config.get("WorkingDir") or "/",
            "noNewPrivileges": True,
            "capabilities": nothing,
        }
        return {
            "ociVersion": "1.0.2",
            "hostname": "baton",
            "root": {"path": root, "readonly": True},
            "process": process,
            "mounts": [*self._own_mounts(), *self._bound()],
            "linux": {
                "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
                "maskedPaths": ["/proc/kcore", "/proc/keys"],
                "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger"],
            },
        }

    def _own_mounts(self) -> list[dict[str, Any]]:
        def memory(place: str, *options: str) -> dict[str, Any]:
            return {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", *options]}

        return [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "bind", "source": "/sys", "options": ["rbind", "ro"]},
            memory("/dev", "mode=755", "size=64k"),
            memory("/dev/shm", "nodev", "noexec", "mode=1777", f"size={self._shared_memory}"),
            memory("/tmp", "nodev", "mode=1777", "size=2g"),
        ]

    def _bound(self) -> list[dict[str, Any]]:
        return [
            {"destination": place, "type": "bind", "source": str(path), "options": ["bind", "ro"]}
            for place, path in self._binds.items()
        ]


def until(condition: Any, seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return bool(condition())

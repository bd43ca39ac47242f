"""What a child is confined to, and what happens at its limits."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from geo.raster.made import run, sign_model, write_tiff
from geo.raster.processes import REQUEST, children_of, works

from baton_geo.errors import DecoderBusy, RasterBroken
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest
from baton_geo.settings import GeoLimits

LINKED = """
import sys
sys.path.insert(0, sys.argv[1])
import whole, by_file
from pathlib import Path
from baton_geo.raster.sandbox import confine_files
if not confine_files(0, Path(sys.argv[2])):
    sys.exit("old kernel")
import whole.late, by_file.late
"""


def test_packages_that_are_links_out_of_the_environment_can_be_read(tmp_path: Path) -> None:
    """As `uv` makes them with symlinks, Bazel and Nix: a whole folder, or each file of it."""
    elsewhere, environment, out = (tmp_path / name for name in ("elsewhere", "environment", "out"))
    for package in ("whole", "by_file"):
        (elsewhere / package).mkdir(parents=True)
        for name in ("__init__.py", "late.py"):
            (elsewhere / package / name).write_text("")
    (environment / "by_file").mkdir(parents=True)
    out.mkdir()
    (environment / "whole").symlink_to(elsewhere / "whole")
    for name in ("__init__.py", "late.py"):
        (environment / "by_file" / name).symlink_to(elsewhere / "by_file" / name)
    command = [sys.executable, "-c", LINKED, str(environment), str(out)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if "old kernel" in done.stderr:
        pytest.skip("no Landlock in this kernel")
    assert done.returncode == 0, done.stderr


CONFINED = """
import os, socket, sys
from pathlib import Path
from baton_geo.raster.sandbox import confine_files
raster = os.open(sys.argv[1], os.O_RDONLY)
if not confine_files(raster, Path(sys.argv[2])):
    sys.exit("old kernel")
def tried(action):
    try:
        action()
    except PermissionError:
        return "no"
    return "yes"
server = int(sys.argv[3])
print(
    tried(lambda: open(f"/proc/self/fd/{raster}", "rb").read(4)),
    tried(lambda: Path(sys.argv[2], "x").write_text("x")),
    tried(lambda: __import__("sndhdr" if sys.version_info < (3, 13) else "colorsys")),
    tried(lambda: open("/etc/passwd").read(1)),
    tried(lambda: open(sys.argv[1] + ".other").read(1)),
    tried(lambda: os.symlink("/etc/passwd", sys.argv[2] + "/y")),
    tried(lambda: socket.create_connection(("127.0.0.1", server), 1)),
    tried(lambda: os.kill(os.getppid(), 0)),
)
"""


def test_the_kernel_keeps_a_child_in(tmp_path: Path, raster: Path, folder: Path) -> None:
    """Confined: its raster, its folder and its program; no other file, link, connection or signal."""
    import socket

    Path(f"{raster}.other").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = [str(raster), str(folder), str(server.getsockname()[1])]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CONFINED, *arguments], capture_output=True, text=True
        )
    if "old kernel" in done.stderr:
        pytest.skip("this kernel has no Landlock")
    assert done.stdout.split() == ["yes", "yes", "yes", "no", "no", "no", "no", "no"], done.stderr


def test_no_room_for_the_result(own: Decoders, tmp_path: Path, raster: Path) -> None:
    """When our own files cannot be written that is a retryable failure of the server, not a fault of the raster."""
    pixels = np.ones((1, 600, 600), "uint8")
    with own.open(write_tiff(tmp_path / "a.tif", pixels), REQUEST) as scene:
        child = children_of(own)[0]
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(DecoderBusy, match="could not be written"):
            run(scene, sign_model)
    assert works(own, raster)


def test_a_raster_that_is_slow_to_open(own: Decoders, raster: Path) -> None:
    """The processor's time is what counts: a busy machine refuses no sound raster."""
    with pytest.raises(RasterBroken, match=r"could not be read within 0.001 s"):
        own.open(raster, SceneRequest(card=REQUEST.card, limits=GeoLimits(open_seconds=0.001)))
    assert children_of(own) == []
    with own.open(raster, REQUEST) as scene:
        assert scene.info.tiles > 0

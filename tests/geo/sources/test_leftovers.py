"""Rasters and scenes that a killed server left are gone after the next start; those in use, and others', stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from geo.raster.made import make_card, write_tiff
from geo.sources.hosts import left

from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import SceneRequest
from baton_geo.spool import Spool, prepare_folder

KILLED = """
import os, signal, sys
from pathlib import Path
from baton_geo.raster.messages import SceneRequest
from baton_geo.raster.decoders import Decoders
from baton_geo.spool import Spool
folder, raster, request = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
finished = Spool(folder, 100)
finished.write(b"whole")
kept = finished.finish()
half = Spool(folder, 100)
half.write(b"half")
decoders = Decoders(1, 5.0, folder)
scene = decoders.open(raster, SceneRequest.model_validate_json(request))
scene.read(0)
print(decoders._fork_server._server.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def at(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


@pytest.mark.fault("A8")
@pytest.mark.fault("A11")
def test_what_a_killed_server_left_goes_with_the_next_start(at: Path, tmp_path: Path) -> None:
    """A raster half written, one in use, and a scene's folder with its draft: all of it, and no process is left."""
    raster = write_tiff(tmp_path / "a.tif", np.ones((1, 40, 40), "uint8"))
    request = SceneRequest(card=make_card()).model_dump_json()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(at), str(raster), request],
        check=False,
        capture_output=True,
        text=True,
    )
    psutil.wait_procs([psutil.Process(pid) for pid in [int(killed.stdout)] if psutil.pid_exists(pid)], 10)
    names = left(at)
    assert len(names) == 3
    assert [name.startswith("baton-geo-scene-") for name in names].count(True) == 1
    assert any(list(path.iterdir()) for path in at.iterdir() if path.is_dir())
    prepare_folder(at)
    assert left(at) == []


def test_what_is_in_use_stays(at: Path, tmp_path: Path) -> None:
    """Of another engine of the same server, or of another server with the same folder."""
    raster = write_tiff(tmp_path / "a.tif", np.ones((1, 40, 40), "uint8"))
    decoders = Decoders(1, 5.0, at)
    try:
        with (
            Spool(at, 100) as half,
            Spool(at, 100) as whole,
            decoders.open(raster, SceneRequest(card=make_card())),
        ):
            whole.write(b"whole")
            with whole.finish() as spooled:
                prepare_folder(at)
                assert spooled.path.read_bytes() == b"whole"
                assert len(left(at)) == 3
            half.write(b"half")
    finally:
        decoders.close()
    assert left(at) == []


@pytest.mark.fault("B14")
@pytest.mark.timeout(20)
def test_what_others_planted_is_left_alone(
    at: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe, links to a file and to a folder, a folder of other rights, and names that are not quite ours."""
    precious = tmp_path / "precious"
    precious.mkdir(0o700)
    (precious / "thesis.tif").write_bytes(b"precious")
    planted = [f"baton-geo-{number:016x}.raster" for number in range(2)]
    os.mkfifo(at / planted[0], 0o600)
    (at / planted[1]).symlink_to(precious / "thesis.tif")
    scenes = [f"baton-geo-scene-{number:016x}" for number in range(2)]
    (at / scenes[0]).symlink_to(precious)
    (at / scenes[1]).mkdir(0o755)
    (at / "baton-geo-scene-of-mine").mkdir(0o700)
    before = left(at)
    prepare_folder(at)
    assert left(at) == before
    assert (precious / "thesis.tif").read_bytes() == b"precious"
    (record,) = caplog.records
    assert (record.levelname, record.args) == ("ERROR", (4, planted[0]))


@pytest.mark.fault("B14")
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("kind", "words"),
    [("link", "symbolic link"), ("pipe", "is no folder"), ("missing", "does not exist")],
)
def test_a_folder_that_cannot_be_used_ends_the_start(tmp_path: Path, kind: str, words: str) -> None:
    """With the setting's name, and not at the first request."""
    folder, real = tmp_path / "spool", tmp_path / "real"
    real.mkdir()
    if kind == "link":
        folder.symlink_to(real)
    elif kind == "pipe":
        os.mkfifo(folder)
    with pytest.raises(ValueError, match=rf"baton_geo\.spool: .*{words}"):
        prepare_folder(folder)

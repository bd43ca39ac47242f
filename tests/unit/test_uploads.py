"""Files on their way in are their gateway's alone, and gone when it is."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.errors import InvalidRequest, SettingsError
from baton.pooling.uploads import UploadSpool, require_folder, sweep


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_a_file_is_there_until_it_is_closed(tmp_path: Path) -> None:
    """Whole, and under a name of its own."""
    spool = UploadSpool(tmp_path)
    await spool.fill(chunks(b"a" * 3_000_000, b"", b"end"))
    assert spool.path.read_bytes() == b"a" * 3_000_000 + b"end"
    await spool.close()
    await spool.close()
    with pytest.raises(InvalidRequest):
        await UploadSpool(tmp_path).fill(chunks())
    assert names_in(tmp_path) == []


async def test_another_gateways_sweep_takes_no_file_in_use(tmp_path: Path) -> None:
    """Neither one that is just being made, nor one that waits for the plugin."""
    over = threading.Event()

    def sweeping() -> None:
        while not over.is_set():
            sweep(tmp_path)

    async def one(number: int) -> None:
        spool = UploadSpool(tmp_path)
        await spool.fill(chunks(str(number).encode()))
        await asyncio.sleep(0.01)
        assert spool.path.read_bytes() == str(number).encode()
        await spool.close()

    thread = threading.Thread(target=sweeping)
    thread.start()
    try:
        for start in range(0, 200, 20):
            await asyncio.gather(*(one(number) for number in range(start, start + 20)))
    finally:
        over.set()
        thread.join()
    assert names_in(tmp_path) == []


@pytest.mark.fault("A8")
@pytest.mark.fault("A11")
def test_what_a_killed_gateway_left_goes_with_the_next_start(tmp_path: Path) -> None:
    """And other people's files stay."""
    (tmp_path / "notes.txt").write_text("mine")
    script = f"""
import asyncio, os, signal
from pathlib import Path
from baton.pooling.uploads import UploadSpool
async def chunks():
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(UploadSpool(Path({str(tmp_path)!r})).fill(chunks()))
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    assert len(names_in(tmp_path)) == 2
    require_folder(tmp_path)
    assert names_in(tmp_path) == ["notes.txt"]


def test_a_folder_that_cannot_take_files_is_told_at_the_start(tmp_path: Path) -> None:
    """Not at the first request."""
    with pytest.raises(SettingsError, match="spool_dir"):
        require_folder(tmp_path / "nowhere")


PLANTED = "baton-upload-0123456789abcdef"
"""A name that an upload may have."""


def plant(kind: str, path: Path, target: Path) -> None:
    """What another user may put in a folder that all may write."""
    match kind:
        case "pipe":
            os.mkfifo(path, 0o600)
        case "link":
            path.symlink_to(target)
        case "folder":
            path.mkdir(0o700)
        case "file of another user":
            path.write_bytes(b"theirs")
            path.chmod(0o600)
            os.chown(path, 12345, 12345)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


@pytest.mark.fault("B14")
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "kind", ["pipe", "link", "folder", pytest.param("file of another user", marks=needs_root)]
)
def test_what_others_planted_is_told_and_left_alone(tmp_path: Path, kind: str) -> None:
    """The start neither hangs nor follows a link nor removes what is not its own; one line says so."""
    folder, target = tmp_path / "spool", tmp_path / PLANTED
    folder.mkdir()
    target.write_bytes(b"precious")
    target.chmod(0o600)
    plant(kind, folder / PLANTED, target)
    before = os.lstat(folder / PLANTED)
    with capture_logs() as lines:
        require_folder(folder)
    assert os.lstat(folder / PLANTED) == before
    assert target.read_bytes() == b"precious"
    (line,) = lines
    assert (line["log_level"], line["count"], line["first"]) == ("error", 1, PLANTED)


@pytest.mark.fault("B14")
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("pipe", "is no folder"),
        ("link", "is a symbolic link; name the folder that it leads to"),
        ("file", "is no folder"),
        ("open to all", "chmod o-w"),
        pytest.param("of another user", "belongs to user 12345", marks=needs_root),
    ],
)
def test_a_folder_that_is_not_ours_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    """Before anything is made or removed in it."""
    real, folder = tmp_path / "real", tmp_path / "spool"
    real.mkdir()
    left = real / PLANTED
    left.write_bytes(b"left")
    left.chmod(0o600)
    match kind:
        case "pipe":
            os.mkfifo(folder)
        case "link":
            folder.symlink_to(real)
        case "file":
            folder.write_bytes(b"")
        case _:
            folder = real
            folder.chmod(0o777)
            if os.geteuid() == 0:  # whose own folders are taken as the system's
                os.chown(folder, 12345, -1)
                monkeypatch.setattr(os, "geteuid", lambda: 12345 if kind == "open to all" else 0)
    with pytest.raises(SettingsError, match=words) as caught:
        require_folder(folder)
    assert str(caught.value).startswith(f"pooling.spool_dir: {folder} ") or kind == "open to all"
    assert "\n" not in str(caught.value)
    assert left.read_bytes() == b"left"


@pytest.mark.fault("B14")
async def test_a_folder_that_is_swapped_takes_no_files(tmp_path: Path) -> None:
    """A link put in the folder's place after the start: nothing is written where it leads."""
    folder, theirs = tmp_path / "spool", tmp_path / "theirs"
    folder.mkdir()
    theirs.mkdir()
    require_folder(folder)
    folder.rmdir()
    folder.symlink_to(theirs)
    with pytest.raises(OSError, match="symbolic link"):
        await UploadSpool(folder).fill(chunks(b"a"))
    assert names_in(theirs) == []


async def test_files_are_their_users_alone(tmp_path: Path) -> None:
    """Mode 0600, a name that nobody foresees, and a planted file of another name stays."""
    (tmp_path / "baton-upload-notes").write_text("mine")

    names = set()
    for _ in range(2):
        spool = UploadSpool(tmp_path)
        await spool.fill(chunks(b"a"))
        assert stat.S_IMODE(spool.path.stat().st_mode) == 0o600
        names.add(spool.path.name)
        await spool.close()
    assert len(names) == 2
    require_folder(tmp_path)
    assert names_in(tmp_path) == ["baton-upload-notes"]

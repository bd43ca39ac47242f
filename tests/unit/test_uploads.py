"""Files on their way in are their gateway's alone, and gone when it is."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.errors import InvalidRequest, SettingsError
from baton.pooling.uploads import Spool, require_folder, sweep


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def test_a_file_is_there_until_it_is_closed(tmp_path: Path) -> None:
    """Whole, and under a name of its own."""

    async def main() -> None:
        spool = Spool(tmp_path)
        await spool.fill(chunks(b"a" * 3_000_000, b"", b"end"))
        assert spool.path.read_bytes() == b"a" * 3_000_000 + b"end"
        await spool.close()
        await spool.close()
        with pytest.raises(InvalidRequest):
            await Spool(tmp_path).fill(chunks())

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_another_gateways_sweep_takes_no_file_in_use(tmp_path: Path) -> None:
    """Neither one that is just being made, nor one that waits for the plugin."""
    over = threading.Event()

    def sweeping() -> None:
        while not over.is_set():
            sweep(tmp_path)

    async def one(number: int) -> None:
        spool = Spool(tmp_path)
        await spool.fill(chunks(str(number).encode()))
        await asyncio.sleep(0.01)
        assert spool.path.read_bytes() == str(number).encode()
        await spool.close()

    async def main() -> None:
        for start in range(0, 200, 20):
            await asyncio.gather(*(one(number) for number in range(start, start + 20)))

    thread = threading.Thread(target=sweeping)
    thread.start()
    try:
        asyncio.run(main())
    finally:
        over.set()
        thread.join()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_gateway_left_goes_with_the_next_start(tmp_path: Path) -> None:
    """And other people's files stay."""
    (tmp_path / "notes.txt").write_text("mine")
    script = f"""
import asyncio, os, signal
from pathlib import Path
from baton.pooling.uploads import Spool
async def chunks():
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(Spool(Path({str(tmp_path)!r})).fill(chunks()))
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    require_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_take_files_is_told_at_the_start(tmp_path: Path) -> None:
    """Not at the first request."""
    with pytest.raises(SettingsError, match="spool_dir"):
        require_folder(tmp_path / "nowhere")

"""What another user, or an accident, may have put where a store has its folders and files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.planted_files import foreign_folder, link, open_folder, pipe, plain_file

from baton_kv.contract import new_key
from baton_kv.folders import store_secret
from baton_kv.stores import factory
from baton_kv.stores.base import StoreError
from baton_kv.stores.factory import network_file_system, open_store
from baton_kv.stores.file import ABANDONED_AFTER_S, FileStore

HANGS_AFTER_S = 20
LONG_AGO = (1.0, 1.0)


PLANTS = [link, pipe, plain_file, open_folder, foreign_folder]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Make a foreign folder with files as old as those that a store sweeps."""
    folder = tmp_path / "victim"
    for name in ("document", ".hidden", "scope/old.kv"):
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(name)
        os.utime(path, LONG_AGO)
    return folder


def untouched(victim: Path) -> bool:
    found = {str(path.relative_to(victim)) for path in victim.rglob("*") if path.is_file()}
    return found == {"document", ".hidden", "scope/old.kv"}


def error_of(act: Callable[[], object], kind: type[Exception] = StoreError) -> str:
    """Return what an act raises; fail if it hangs."""
    errors: list[str] = []

    def run() -> None:
        try:
            act()
        except kind as error:
            errors.append(str(error))

    aside = threading.Thread(target=run, daemon=True)
    aside.start()
    aside.join(HANGS_AFTER_S)
    assert not aside.is_alive(), "it hangs"
    assert errors, "it was not refused"
    return errors[0]


@pytest.mark.fault("B14")
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("place", [".", "entries", "writing", "quarantine"])
def test_a_planted_folder_is_refused_in_one_line_and_nothing_in_it_touched(
    place: str, plant: Callable[[Path, Path], None], tmp_path: Path, victim: Path
) -> None:
    root = tmp_path / "store"
    if place != ".":
        root.mkdir(mode=0o700)
    plant(root / place if place != "." else root, victim)
    error = error_of(lambda: open_store(f"file:{root}", budget=1000))
    print(f"\nB14: {plant.__name__} at {place}: {error}")
    assert str(root) in error
    assert "\n" not in error
    assert untouched(victim)


@pytest.mark.fault("B14")
@pytest.mark.parametrize("plant", [link, pipe])
@pytest.mark.parametrize("name", ["secret", "lock", "written"])
def test_a_planted_link_or_pipe_for_a_file_is_refused_and_holds_nobody(
    name: str, plant: Callable[[Path, Path], None], tmp_path: Path, victim: Path
) -> None:
    store = FileStore(tmp_path / "store", budget=1000)
    plant(store.root / name, victim / "document")
    if name == "secret":
        error_of(lambda: store_secret(store.root), OSError)
    else:
        error_of(lambda: store.put(new_key("acme"), [b"x"]))
    assert (victim / "document").read_text() == "document"


@pytest.mark.fault("B8")
@pytest.mark.fault("B14")
def test_a_scope_s_folder_swapped_for_a_link_is_never_followed(tmp_path: Path, victim: Path) -> None:
    store = FileStore(tmp_path / "store", budget=1000)
    (victim / "scope").rename(victim / "kept")
    entry = victim / "kept" / f"{'o' * 32}.kv"
    (victim / "kept" / "old.kv").rename(entry)
    (store.root / "entries" / "acme").symlink_to(victim / "kept")
    key = f"acme/{'o' * 32}"
    error_of(lambda: store.put(new_key("acme"), [b"x"]))
    error_of(lambda: store.delete(key))
    error_of(lambda: store.pin(key, True))
    error_of(lambda: store.open(key).__enter__())
    store.quarantine(key)
    assert store.sweep(wanted=lambda _: False, older_than_s=0) == 0
    store.put(new_key("globex"), [b"x" * 1000])
    keys = list(store.keys())
    assert ([key.partition("/")[0] for key in keys], store.size()) == (["globex"], 1000)
    assert [path.name for path in (victim / "kept").iterdir()] == [entry.name]
    assert entry.read_text() == "scope/old.kv"


@pytest.mark.fault("B8")
def test_an_entry_swapped_for_a_link_is_not_followed_and_only_the_link_goes(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", budget=1000)
    key, other = new_key("acme"), tmp_path / "other.kv"
    store.put(key, [b"x" * 100])
    place = store.root / "entries" / f"{key}.kv"
    place.rename(other)
    place.symlink_to(other)
    error_of(lambda: store.open(key).__enter__())
    assert (store.exists(key), list(store.keys()), store.size()) == (False, [], 0)
    store.sweep(wanted=lambda _: False, older_than_s=-1)
    assert store.delete(key)
    assert (other.read_bytes(), place.is_symlink()) == (b"x" * 100, False)
    place.symlink_to(other)
    store.put(key, [b"new"])
    assert (other.read_bytes(), place.read_bytes()) == (b"x" * 100, b"new")


@pytest.mark.fault("B14")
def test_what_is_old_is_swept_at_a_start_and_what_it_links_to_is_not(tmp_path: Path, victim: Path) -> None:
    store = FileStore(tmp_path / "store")
    left = store.root / "writing" / ("ab" * 16)
    left.symlink_to(victim / "document")
    old = ABANDONED_AFTER_S + 5
    os.utime(left, (left.lstat().st_mtime - old,) * 2, follow_symlinks=False)
    (store.root / "writing" / "folder").mkdir()
    os.utime(store.root / "writing" / "folder", LONG_AGO)
    mine = [store.root / ".bashrc", store.root / "writing" / "notes"]  # the store may be in somebody's folder
    for path in mine:
        path.write_text("mine")
        os.utime(path, LONG_AGO)
    FileStore(store.root)
    assert not left.is_symlink()
    assert [path.read_text() for path in mine] == ["mine", "mine"]
    assert untouched(victim)


class Calls:
    """The calls of `os` that put an entry on a device, in order, with what they were for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        real_fsync, real_rename, real_writev, seen = os.fsync, os.rename, os.writev, self.seen

        def fsync(descriptor: int) -> None:
            seen.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).parent.name}")
            real_fsync(descriptor)

        def rename(*args: Any, **named: Any) -> None:
            seen.append("rename")
            real_rename(*args, **named)

        def writev(descriptor: int, buffers: list[memoryview]) -> int:
            seen.append("write")
            return real_writev(descriptor, buffers)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)
        monkeypatch.setattr(os, "writev", writev)


@pytest.mark.fault("B2")
def test_bytes_reach_the_device_before_the_name_and_the_name_before_the_put_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, plain = FileStore(tmp_path / "store", fsync=True), FileStore(tmp_path / "plain")
    calls = Calls(monkeypatch)
    store.put(new_key("acme"), [b"x"])
    store.put(new_key("acme"), [b"y"])
    # By their parents: the file is in `writing`, the scope's folder in `entries`, `entries` in the root.
    assert calls.seen == [
        *("write", "fsync writing", "rename", "fsync entries", "fsync store"),
        *("write", "fsync writing", "rename", "fsync entries"),
    ]
    calls.seen.clear()
    plain.put(new_key("acme"), [b"x"])
    assert calls.seen == ["write", "rename"]


def test_a_store_on_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request looks entries up in the engine's own loop, which a server that hangs would stop."""
    device = os.stat(tmp_path).st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /there rw,noatime shared:1 - {{}} far:/there rw\n"
    mounts = tmp_path / "mountinfo"
    for kind, found in (("ext4", None), ("nfs4", "nfs4"), ("fuse.s3fs", "fuse.s3fs")):
        mounts.write_text(line.format(kind))
        assert network_file_system(tmp_path / "not" / "yet", mounts) == found
    assert network_file_system(tmp_path, tmp_path / "missing") is None
    assert network_file_system(tmp_path) is None
    monkeypatch.setattr(factory, "network_file_system", lambda _folder: "nfs4")
    assert "a network file system (nfs4)" in error_of(lambda: open_store(f"file:{tmp_path / 'store'}"))
    assert not (tmp_path / "store").exists()

"""Digests of weights are remembered while nothing about the files has changed, and never longer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from baton_kv import fingerprint
from baton_kv.fingerprint import KnownDigests, digest_of


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(fingerprint, "SETTLED_AFTER_S", -60.0)  # files just written count as settled
    files = [tmp_path / name for name in ("config.json", "model.safetensors")]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 1000)
    return files


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often files were read."""
    found: list[int] = []

    def counted(files: list[Path]) -> str:
        found.append(len(files))
        return digest_of(files)

    monkeypatch.setattr(fingerprint, "digest_of", counted)
    return found


def test_files_are_read_once(tmp_path: Path, weights: list[Path], reads: list[int]) -> None:
    file = tmp_path / "weights.json"
    assert KnownDigests(file).digest(weights) == KnownDigests(file).digest(weights) == digest_of(weights)
    assert reads == [2]
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_change_of_bytes_time_or_inode_is_read_again(
    tmp_path: Path, weights: list[Path], reads: list[int]
) -> None:
    known = KnownDigests(tmp_path / "weights.json")
    before = known.digest(weights)
    stat = weights[1].stat()
    weights[1].write_bytes(b"\7" * 1000)
    os.utime(
        weights[1], ns=(stat.st_atime_ns, stat.st_mtime_ns)
    )  # as `cp -p` or an unpacked archive leave it
    assert known.digest(weights) == digest_of(weights) != before
    copy = tmp_path / "copy"
    copy.write_bytes(weights[0].read_bytes())
    copy.replace(weights[0])
    assert known.digest(weights) == digest_of(weights)
    assert len(reads) == 3


def test_a_file_that_just_changed_is_not_remembered(
    tmp_path: Path, weights: list[Path], reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "SETTLED_AFTER_S", 60.0)
    known = KnownDigests(tmp_path / "weights.json")
    known.digest(weights)
    known.digest(weights)
    assert reads == [2, 2]


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    tmp_path: Path, weights: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(files: list[Path]) -> str:
        found = digest_of(files)
        time.sleep(0.01)
        files[0].write_bytes(b"\5" * 1000)
        return found

    monkeypatch.setattr(fingerprint, "digest_of", slowly)
    KnownDigests(tmp_path / "weights.json").digest(weights)
    assert not (tmp_path / "weights.json").exists()


@pytest.mark.parametrize("held", ["", "[]", '{"a": 7}', "\x00\xff", '{"a": "short"}'])
def test_what_is_no_list_of_digests_counts_as_empty(tmp_path: Path, weights: list[Path], held: str) -> None:
    file = tmp_path / "weights.json"
    file.write_text(held)
    assert KnownDigests(file).digest(weights) == digest_of(weights)


def test_where_nothing_can_be_written_files_are_read_again(
    tmp_path: Path, weights: list[Path], reads: list[int]
) -> None:
    known = KnownDigests(tmp_path / "nowhere" / "weights.json")
    known.digest(weights)
    known.digest(weights)
    assert reads == [2, 2]


def test_only_the_newest_are_kept(
    tmp_path: Path, weights: list[Path], reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "MAX_REMEMBERED", 1)
    known = KnownDigests(tmp_path / "weights.json")
    for files in ([weights[0]], [weights[1]], [weights[1]], [weights[0]]):
        known.digest(files)
    assert reads == [1, 1, 1]

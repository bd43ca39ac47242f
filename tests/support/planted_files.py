"""Put links, pipes and foreign folders where a store or a gateway has folders and files of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NOBODY = 65534


def link(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def pipe(place: Path, _victim: Path) -> None:
    os.mkfifo(place, 0o600)


def plain_file(place: Path, _victim: Path) -> None:
    place.write_text("x")


def open_folder(place: Path, _victim: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def foreign_folder(place: Path, _victim: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's folder")
    place.mkdir(mode=0o700)
    os.chown(place, NOBODY, NOBODY)

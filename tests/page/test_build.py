"""The page's built files: of these sources, small, and asking no other host."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest
from support.browsers import BUILT, ROOT, SOURCES, run_npm, with_node

FIRST_LOAD = 60_000
"""Most bytes, compressed, of all that a browser asks for before the page is there."""
BESIDE = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts")


def sources() -> dict[str, str]:
    """The digest of each file that decides what is built."""
    files = [*SOURCES.glob("src/**/*"), *(SOURCES / name for name in BESIDE)]
    return {
        file.relative_to(ROOT).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.is_file()
    }


@pytest.mark.fault("J4")
def test_what_is_shipped_was_built_of_these_sources() -> None:
    """A change of `ui/` without a build would never reach anybody: `make ui`."""
    lines = (BUILT / "sources.sha256").read_text().splitlines()
    stamped = {path: digest for digest, path in (line.split("  ") for line in lines)}
    assert stamped == sources()


def linked() -> list[Path]:
    """The files that the page names."""
    html = (BUILT / "index.html").read_text()
    addresses = [
        each for each in re.findall(r'(?:src|href)="([^"]*)"', html) if not each.startswith("data:,")
    ]
    assert addresses
    assert all(address.startswith("ui/assets/") for address in addresses), addresses
    return [BUILT / address.removeprefix("ui/") for address in addresses]


def test_the_first_load_is_small() -> None:
    """At most 60 kB are asked for, compressed as the gateway does, before the page is there."""
    sizes = {path.name: len(gzip.compress(path.read_bytes())) for path in (BUILT / "index.html", *linked())}
    assert sum(sizes.values()) <= FIRST_LOAD, sizes
    assert {path.name for path in linked()} == {path.name for path in (BUILT / "assets").iterdir()}


def test_no_file_names_another_host_or_makes_markup_of_text() -> None:
    """Nothing is fetched from elsewhere, and there is no way from a text into the page but as text."""
    for path in (BUILT / "index.html", *linked()):
        text = path.read_text()
        hosts = set(re.findall(r"https?://[\w.-]+", text))
        assert hosts <= {"http://www.w3.org"}, f"{path.name}: {hosts}"  # names of XML namespaces
        assert not re.search(r"<script(?![^>]* src=)|<style| on\w+=|\beval\(|new Function\b", text), path.name
    for path in SOURCES.glob("src/*.ts*"):
        assert not re.search(r"dangerouslySetInnerHTML|innerHTML|insertAdjacentHTML", path.read_text()), (
            path.name
        )


def test_every_bundled_package_comes_with_its_licence() -> None:
    """Whoever gets the page gets them too."""
    told = (BUILT / "licences.txt").read_text()
    lock = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    wanted = {
        name.removeprefix("node_modules/"): about
        for name, about in lock.items()
        if name and not about.get("dev")
    }
    assert wanted
    for name, about in wanted.items():
        assert f"{name} {about['version']} ({about['license']})" in told
        assert all("resolved" not in each for each in lock.values())  # no address of one registry


@pytest.mark.fault("J4")
@pytest.mark.registry
@pytest.mark.timeout(600)
def test_a_build_anew_is_the_same_and_the_sources_pass_their_checks(tmp_path: Path) -> None:
    """Byte for byte, from the locked packages; `tsc` and the linter have nothing to say."""
    copy = with_node(tmp_path)
    checked = run_npm(copy, "run", "check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    built = run_npm(copy, "run", "build")
    assert built.returncode == 0, built.stdout + built.stderr
    again = tmp_path / "app/baton/ui"

    def files(folder: Path) -> dict[str, bytes]:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }

    assert files(again) == files(BUILT)

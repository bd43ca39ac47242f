"""README.md, CONTRIBUTING.md and docs/ are true: their code runs, and what they name is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from support.gateways import RealGateway
from support.rows import each

from baton.config.settings import load_settings

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_build" not in path.parts
}
HERE = "http://127.0.0.1:8000"
FOLDERS = r"(?:app|plugins|connectors|tests|bench|deploy|docs|training|examples)/"
ROOMS = r"(?:admission|config|engines|http|images|library|models|pooling|relay|responses|telemetry)/"


BLOCKS = {
    page: [(token.info, token.content) for token in MarkdownIt().parse(text) if token.type == "fence"]
    for page, text in PAGES.items()
}


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a language on a page, in order."""
    return [content for info, content in BLOCKS[page] if info == language]


def with_blocks(*languages: str) -> list[str]:
    return [page for page in PAGES if any(blocks(page, language) for language in languages)]


@each("page", with_blocks("toml"))
def test_the_settings_shown_are_settings(page: str, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "toml")):
        path = tmp_path / f"{number}.toml"
        path.write_text(block)
        assert load_settings(path).engines


@each("page", with_blocks("json"))
def test_the_json_shown_is_json(page: str) -> None:
    assert all(json.loads(block) for block in blocks(page, "json"))


@each("page", PAGES)
def test_every_page_and_file_that_is_linked_is_there(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", PAGES[page]):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), target


@each("page", PAGES)
def test_every_file_that_is_named_is_there(page: str) -> None:
    """From the root of the repository, or from `app/baton/`."""
    for name in re.findall(rf"`({FOLDERS}[\w./-]*)`", PAGES[page]):
        assert (ROOT / name).exists() or name.startswith("docs/_build"), name
    for name in re.findall(rf"`({ROOMS}[\w/]*(?:\.py)?)`", PAGES[page]):
        assert any((root / name).exists() for root in (ROOT / "app/baton", ROOT)), name


@each("page", [page for page in PAGES if "`make " in PAGES[page]])
def test_every_target_of_make_that_is_named_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", PAGES[page]):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_request_step_by_step_names_every_middleware() -> None:
    page = PAGES["docs/explanation/request.md"]
    for path in (ROOT / "app/baton/http/middleware").glob("[a-z]*.py"):
        assert f"`http/middleware/{path.name}`" in page, path.name


def test_the_shipped_settings_are_the_defaults() -> None:
    shipped = load_settings(ROOT / "deploy" / "baton.toml")
    assert shipped.model_dump() == load_settings().model_dump()
    written = (ROOT / "deploy" / "baton.toml").read_text()
    tomllib.loads(written)
    settings = re.findall(r"^\| `([\w.]+)` \|", PAGES["docs/reference/settings.md"], re.MULTILINE)
    assert len(settings) > 50
    for name in settings:
        assert re.search(rf"^#? ?{name.rpartition('.')[2]} = ", written, re.MULTILINE), name


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    """Every link between them holds, and every page is in a table of contents; as `make docs` builds them."""
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "dummy", ROOT / "docs"]
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.engine
@pytest.mark.parametrize("page", with_blocks("bash"))
def test_the_commands_shown_run_on_a_real_gateway(
    page: str, real_gateway: RealGateway, tmp_path: Path
) -> None:
    for block in blocks(page, "bash"):
        script = "set -e\n" + block.replace(HERE, real_gateway.url).replace("curl ", "curl --fail -sS ")
        script = script.replace(".venv/bin/python", sys.executable)
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip()
        assert "Paris" in done.stdout or "capital of France" not in block


@pytest.mark.engine
@pytest.mark.parametrize("page", with_blocks("python"))
def test_the_programs_shown_run_on_a_real_gateway(page: str, real_gateway: RealGateway) -> None:
    for block in blocks(page, "python"):
        code = block.replace(HERE, real_gateway.url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout


def test_the_code_of_the_first_pages_is_found() -> None:
    """The test of the tests."""
    assert {"README.md", "docs/tutorials/first-map.md"} <= set(with_blocks("bash"))
    assert {"README.md", "docs/tutorials/first-handoff.md"} <= set(with_blocks("python"))

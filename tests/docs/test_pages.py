"""README.md, CONTRIBUTING.md and docs/ are true: their code runs, and what they name is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt
from support.gateways import RealGateway
from support.table_tests import each

from baton.config.settings import load_settings

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_build" not in path.parts
}
HERE = "http://127.0.0.1:8000"
FOLDERS = r"(?:app|plugins|connectors|tests|bench|deploy|docs|training|examples)/"
ROOMS = r"(?:admission|batches|config|engines|http|images|library|models|pooling|relay|responses|telemetry)/"


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


def anchors(path: Path) -> set[str]:
    """The headings of a page, as links name them."""
    tokens = MarkdownIt().parse(path.read_text())
    headings = [after.content for at, after in pairwise(tokens) if at.type == "heading_open"]
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each("page", PAGES)
def test_every_page_file_and_heading_that_is_linked_is_there(page: str) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", PAGES[page]):
        if "://" not in target:
            path = (ROOT / page).parent / target if target else ROOT / page
            assert path.exists(), target
            assert not heading or heading in anchors(path), f"{target}#{heading}"


def test_headings_that_others_link_to_are_still_on_the_page_that_was_split() -> None:
    assert {
        "continue-a-chat",
        "without-changing-a-client",
        "a-context-without-an-answer",
        "join-several-contexts",
        "faster-and-not-exact",
        "continue-another-models-handoff",
        "lives-and-pins",
        "hand-images-over",
        "think-before-handing-over",
        "which-engines-can-hand-over",
    } <= anchors(ROOT / "docs/how-to/hand-over.md")


INCLUDES = {
    page: found[1] for page, text in PAGES.items() if (found := re.search(r"\{include\} (\S+)", text))
}


@each("page", INCLUDES)
def test_a_page_that_is_made_of_a_readme_leads_readers_of_the_repository_there(page: str) -> None:
    """Who reads the repository sees no text where Sphinx includes one."""
    text, source = PAGES[page], INCLUDES[page]
    assert f"]({source})" in text
    assert text.splitlines()[0] == (ROOT / page).parent.joinpath(source).read_text().splitlines()[0]


FOLDERS_OF_PAGES = sorted({str(Path(page).parent) for page in PAGES if page.startswith("docs/")} - {"docs"})


@each("folder", FOLDERS_OF_PAGES)
def test_an_index_leads_to_every_page_of_its_folder(folder: str) -> None:
    """By links, because tables of contents are no links to who reads the repository."""
    index = f"{folder}/index.md"
    linked = {
        str((ROOT / folder / target).resolve().relative_to(ROOT))
        for target in re.findall(r"\]\(([^)#\s]+\.md)\)", PAGES[index])
        if "://" not in target
    }
    for page in PAGES:
        if str(Path(page).parent) == folder and page != index:
            source = (ROOT / folder / INCLUDES.get(page, Path(page).name)).resolve()
            assert str(source.relative_to(ROOT)) in linked, page


GLOSSARY = re.findall(
    r"^\| ([^|]+) \| [^|]+ \| \[[^]]+\]\(([^)]+)\) \|$", PAGES["docs/reference/glossary.md"], re.MULTILINE
)


@each("row", GLOSSARY)
def test_a_word_of_the_glossary_is_used_on_the_page_that_explains_it(row: tuple[str, str]) -> None:
    words, target = row
    page = (ROOT / "docs/reference" / target).read_text().lower()
    for word in words.split(", "):
        assert re.search(rf"\b{re.escape(word.lower())}", page), word


def test_no_word_is_twice_in_the_glossary() -> None:
    words = [word for row, _ in GLOSSARY for word in row.split(", ")]
    assert len(words) == len(set(words)) >= 50


def heads(page: str) -> set[str]:
    """What the points of a page are about."""
    return set(re.findall(r"^- \*\*([^*]+?)[.:]?\*\*", PAGES[page], re.MULTILINE))


def test_the_first_page_of_the_site_says_what_the_readme_says() -> None:
    assert len(heads("README.md")) > 4
    assert heads("README.md") <= heads("docs/index.md")


DRAWINGS = sorted((ROOT / "docs").glob("**/*.svg"))


@each("drawing", [path for path in DRAWINGS if "_build" not in path.parts])
def test_a_drawing_is_told_in_words_and_drawn_for_light_and_dark_pages(drawing: Path) -> None:
    text = drawing.read_text()
    svg = ElementTree.fromstring(text)
    for name in ("title", "desc"):
        assert svg.findtext(f"{{http://www.w3.org/2000/svg}}{name}")
    assert "prefers-color-scheme: dark" in text
    assert "<script" not in text
    assert "href" not in text
    shown = [page for page in PAGES if re.search(rf"!\[[^]]{{40,}}\]\([^)]*{drawing.name}\)", PAGES[page])]
    assert shown, "no page shows it with a text alternative"


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

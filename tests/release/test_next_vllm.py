"""`make next-vllm` finds what has moved, and is quiet about what has not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.wheel_environment import ROOT

OLD = {
    "vllm/a.py": "def parse(text, limit=1): ...\nclass Base:\n    def hook(self): ...\n",
    "vllm/b.py": "LIMIT = 1\ndef same(x): ...\n",
}
NEW = {
    "vllm/parsers/a.py": "def parse(text, limit=1): ...\n",
    "vllm/a.py": "class Base:\n    def hook(self, more): ...\n    def added(self): ...\n",
    "vllm/b.py": "if True:\n    LIMIT = 1\ndef same(x): ...\n",
}
OURS = """
from vllm.b import LIMIT, same
from vllm.a import Base
from vllm.a import parse
try:
    from vllm.gone import name
except ImportError:
    from vllm.b import same as name
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("next_vllm", ROOT / ".ci/next_vllm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "next_vllm", module)
    spec.loader.exec_module(module)
    return module


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_what_moved_is_named_with_its_new_place(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports that are gone, hooks with other parameters, new hooks; alternatives count as one."""
    old, new = tree(tmp_path / "old", OLD), tree(tmp_path / "new", NEW)
    monkeypatch.setattr(script, "ROOT", tree(tmp_path / "ours", {"app/ours.py": OURS}))
    assert sorted(script.compare(old, new)) == [
        "  app/ours.py: vllm.a.parse, now in vllm.parsers.a",
        "  vllm.a.Base changed hook(self, more)",
        "  vllm.a.Base gained added(self)",
    ]

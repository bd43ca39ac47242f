"""Tiny models that a script makes, once for a script, its arguments and the tokenizer they take."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from baton.config.settings import load_settings
from baton.models.store import ModelStore, identity


def make_models(script: Path, folder: Path, *arguments: str) -> Path:
    """Let `script SOURCE FOLDER ARGUMENTS` write models to a folder, or copy what it wrote there before.

    Making them takes some ten seconds, most of them imports; copying takes none. What was made lies beside the
    embedded models.
    """
    place = load_settings().models_folder
    source = ModelStore(place).resolve("smollm2")
    libraries = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    told = "\n".join([script.read_text(), identity(source), *libraries, *arguments])
    made = place.with_name("test-models") / hashlib.sha256(told.encode()).hexdigest()[:32]
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
            fresh = Path(scratch) / "made"
            fresh.mkdir()
            command = [sys.executable, str(script), source, str(fresh), *arguments]
            subprocess.run(command, check=True, capture_output=True)
            try:
                os.rename(fresh, made)
            except OSError:
                assert made.exists(), "another process has made them meanwhile"
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder

"""Claude Code and Codex themselves, installed from npm, and an engine whose answers are given, for them to talk to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.models.catalog import SMOLLM2_TEMPLATE
from support.scripted_engines import ScriptedGateway, run_scripted

VERSIONS = {"@anthropic-ai/claude-code": "2.1.197", "@openai/codex": "0.171.0"}
CONTEXT = 65_536
"""Tokens of the engine's context: the programs' instructions and tools alone are more than SmolLM2 was trained for."""
ENDS_WITHIN_S = 180

missing = "" if shutil.which("npm") else "npm is not installed: Debian's packages nodejs and npm"
"""Why the programs cannot be installed; empty: they can."""
must_run = "npm" in os.environ.get("TESTS_NEED", "").split(",")
"""They fail where npm or its registry is missing, and are not skipped: so CI asks for it."""
needed = pytest.mark.skipif(bool(missing) and not must_run, reason=missing)


def install(folder: Path) -> Path:
    """Install both programs; return the folder of their commands."""
    packages = [f"{name}@{version}" for name, version in VERSIONS.items()]
    command = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not must_run:
        pytest.skip(f"npm's registry gives no {' and '.join(packages)}: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr
    return folder / "node_modules" / ".bin"


@dataclass(frozen=True)
class Program:
    """One program in a folder of its own.

    Attributes:
        command: its file.
        home: its home directory.
        work: where it works.
        environment: on top of a bare one.
    """

    command: Path
    home: Path
    work: Path
    environment: dict[str, str]

    def run(self, *arguments: str) -> str:
        """Run it to its end; return what it printed."""
        bare = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        done = subprocess.run(
            [str(self.command), *arguments],
            cwd=self.work,
            env=bare | {"HOME": str(self.home)} | self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=ENDS_WITHIN_S,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout


@contextmanager
def run_writing(writes: Callable[[str], str]) -> Iterator[ScriptedGateway]:
    """Run a gateway on which every model of these programs' makers answers as given.

    Args:
        writes: writes the answer to a prompt's text.
    """
    args = {"max_model_len": CONTEXT, "hf_overrides": {"max_position_embeddings": CONTEXT}}
    serving = {"chat_template": SMOLLM2_TEMPLATE, "tool_call_parser": "hermes"}
    with run_scripted(("claude-*", "gpt-*"), args=args, **serving) as gateway:
        gateway.engine.client.longest = 1024
        gateway.engine.client.writes = writes
        yield gateway


def call(name: str, arguments: dict[str, Any]) -> str:
    """Write a call of a tool as the model does."""
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


def results(prompt: str) -> int:
    """Count the results of tools in a prompt."""
    return prompt.count("<|im_start|>tool\n")


def offers_tools(prompt: str) -> bool:
    """Whether a prompt offers tools to call."""
    return "You can call functions." in prompt

"""Read what the process environment says of this machine and its user."""

from __future__ import annotations

import os
from pathlib import Path


def user_folder(variable: str, fallback: str) -> Path:
    """A folder of the XDG base directory specification."""
    value = os.environ.get(variable)
    return Path(value) if value else Path.home() / fallback


def cores() -> list[int]:
    """The CPU cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def allowed_plugins() -> list[str] | None:
    """The vLLM plugins that `VLLM_PLUGINS` lets in, as vLLM reads it; None: all of them."""
    value = os.environ.get("VLLM_PLUGINS")
    return None if value is None else value.split(",")

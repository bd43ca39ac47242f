"""Read what the process environment says of this machine and its user."""

from __future__ import annotations

import os
from pathlib import Path


def user_folder(variable: str, fallback: str) -> Path:
    """Return a folder of the XDG base directory specification: `variable`'s, else `fallback` at home."""
    value = os.environ.get(variable)
    return Path(value) if value else Path.home() / fallback


def cores() -> list[int]:
    """Return the CPU cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def allowed_plugins() -> list[str] | None:
    """Return the vLLM plugins that `VLLM_PLUGINS` allows, as vLLM reads it; None: all of them."""
    value = os.environ.get("VLLM_PLUGINS")
    return None if value is None else value.split(",")


def visible_gpus() -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists, by number or UUID; None: it is not set."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else [name.strip() for name in listed.split(",") if name.strip()]

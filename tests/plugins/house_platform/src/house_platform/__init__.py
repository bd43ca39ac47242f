"""A vLLM platform from outside its tree: the CPU, with another block size.

The entry point says whether this machine is one of its kind, and must import nothing heavy.
"""

from __future__ import annotations


def chosen() -> str | None:
    """`vllm.platform_plugins`: where the platform's class is; None on a machine that is not of its kind."""
    return "house_platform.platform.HousePlatform"

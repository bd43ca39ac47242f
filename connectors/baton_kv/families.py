"""List the families of models by what their caches hold, and whether their KV is handed over.

`engine_facts` admits and refuses by this list, and the documentation's table is made of it. A family is
admitted where its equivalence row is green: what is said after a load is what is said without one. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Support:
    """A family of caches.

    Attributes:
        holds: what a layer's cache holds.
        models: models that have such layers.
        needs: what an engine has to be set to; empty: nothing.
        refused: why it is refused on every device; empty: it is not.
        refused_on_cpus: why it is refused on CPUs alone.
        proved_on_gpus: whether it needs no `unproven_devices` on NVIDIA GPUs.
        row: test that proves it, a path of the repository.
    """

    holds: str
    models: str
    needs: str = ""
    refused: str = ""
    refused_on_cpus: str = ""
    proved_on_gpus: bool = False
    row: str = ""


ROW = "tests/connector/test_states.py"


class Family(Enum):
    """The families."""

    FULL = Support(
        "Keys and values of all tokens",
        "Llama, Qwen 2 and 3, Mistral, Phi, Gemma 1",
        proved_on_gpus=True,
        row=ROW,
    )
    WINDOWS = Support(
        "Keys and values of the last tokens, beside layers that keep all or alone",
        "Gemma 3, gpt-oss, Mistral 7B v0.1",
        row=ROW,
    )
    SHAPES = Support(
        "Keys and values whose heads, head sizes or block sizes differ by layer",
        "Gemma 4",
        needs="`tensor_parallel_size = 1`, no speculative decoding",
        row=ROW,
    )
    MAMBA2 = Support(
        "Running states of Mamba 2, beside attention",
        "Granite 4, Nemotron H, Falcon H1",
        needs="`tensor_parallel_size = 1`, no speculative decoding; on CPUs `enable_prefix_caching = false`",
        row=ROW,
    )
    GDN_ATTN = Support(
        "Running states of gated delta nets, beside attention",
        "Qwen3-Next, Qwen3.5",
        needs="`tensor_parallel_size = 1`, no speculative decoding",
        row=ROW,
    )
    SHORT_CONV = Support(
        "Running states of short convolutions, beside attention",
        "LFM2",
        needs="`tensor_parallel_size = 1`, no speculative decoding",
        refused_on_cpus="vLLM's CPU backend computes a prompt in chunks otherwise than whole",
    )
    OTHER_STATES = Support(
        "Other running states: Mamba 1, linear attention, Kimi's delta attention",
        "Jamba, Kimi Linear, Kimi K3, MiniMax",
        refused="no run has proved them",
    )
    MLA = Support(
        "One latent vector a token (MLA)",
        "DeepSeek V2, V3 and R1, Kimi K2",
        refused_on_cpus="vLLM's CPU backend decodes them otherwise than it prefills them",
    )
    SPARSE = Support(
        "MLA and the keys of an index (sparse attention)",
        "DeepSeek V3.2, GLM-5",
        refused="vLLM runs none on CPUs, and no run on a GPU has proved it",
    )
    CHUNKS = Support(
        "Keys and values of one chunk (chunked attention)", "Llama 4", refused="no run has proved it"
    )
    OTHER = Support(
        "Anything else: cross attention, compressed or quantised caches of other kinds",
        "Whisper, DeepSeek V4",
        refused="no run has proved it",
    )

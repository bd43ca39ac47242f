"""Run vLLM for CUDA without its compiled kernels: Triton's attention and torch's other operators.

Python imports this by itself from a folder on PYTHONPATH. Questions to the kernels are answered with no.
"""

import importlib.abc
import importlib.machinery
import sys

KERNELS = "vllm._C_stable_libtorch"
ABSENT = ("vllm.vllm_flash_attn.flash_attn_interface",)
QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_sparse_scaled_mm_supported",
    "cutlass_group_gemm_supported",
)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives an empty module for the kernels, and refuses the others."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname in ABSENT:
            raise ImportError(f"{fullname} is left out")
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == KERNELS else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        import torch

        module.library = library = torch.library.Library("_C", "FRAGMENT")
        for name in QUESTIONS:
            library.define(f"{name}(int c) -> bool")
            library.impl(name, lambda c: False, "CompositeExplicitAutograd")
        library.define("silu_and_mul(Tensor! out, Tensor input) -> ()")

        def silu_and_mul(out, input):
            gate, up = input.chunk(2, -1)
            out.copy_(torch.nn.functional.silu(gate) * up)

        library.impl("silu_and_mul", silu_and_mul, "CompositeExplicitAutograd")


sys.meta_path.insert(0, Stubs())

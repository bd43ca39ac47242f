"""Unpack a GGUF file into a folder that vLLM serves: `python -m baton.models.convert GGUF FOLDER`.

Runs in a process of its own, so that the memory that transformers takes is freed.
Source of the recipe: transformers' GGUF loader (`gguf_file=`), which dequantizes to float tensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write `gguf` to `folder` as bfloat16 safetensors with its tokenizer and chat template.

    Raises:
        OSError: it cannot be read; found out before the imports, which take seconds.
    """
    gguf.open("rb").close()
    import torch  # imports take seconds, and only this process needs them
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _drop_quantization(folder / "config.json")


def _drop_quantization(config_file: Path) -> None:
    """Remove the quantization entry, which would make vLLM expect GGUF: the saved weights are floats."""
    config = json.loads(config_file.read_text())
    config.pop("quantization_config", None)
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

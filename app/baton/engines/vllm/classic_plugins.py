"""Supply the import names and the base class that IO processor plugins for vLLM 0.11 to 0.15 need.

They exist only while the plugin of an engine with `classic_plugin = true` is imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import vllm.inputs
import vllm.plugins.io_processors.interface as interface
from vllm.entrypoints.pooling.pooling.protocol import (
    IOProcessorRequest,
    IOProcessorResponse,
    PoolingRequest,
    PoolingResponse,
)
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel, UsageInfo
from vllm.plugins.io_processors.interface import IOProcessor
from vllm.pooling_params import PoolingParams
from vllm.tokenizers import get_tokenizer
from vllm.utils.counter import Counter
from vllm.utils.import_utils import resolve_obj_by_qualname

_PROTOCOL = {
    "IOProcessorRequest": IOProcessorRequest,
    "IOProcessorResponse": IOProcessorResponse,
    "OpenAIBaseModel": OpenAIBaseModel,
    "PoolingRequest": PoolingRequest,
    "PoolingResponse": PoolingResponse,
    "UsageInfo": UsageInfo,
}
_INPUTS = ("PromptType", "TextPrompt", "TokensPrompt", "EmbedsPrompt", "DataPrompt", "SingletonPrompt")
MOVED: dict[str, dict[str, Any]] = {
    "vllm.entrypoints.openai.protocol": _PROTOCOL,
    "vllm.entrypoints.openai.engine.protocol": _PROTOCOL,
    "vllm.inputs.data": {name: getattr(vllm.inputs, name) for name in _INPUTS},
    "vllm.multimodal.inputs": {"MultiModalDataDict": vllm.inputs.MultiModalDataDict},
    "vllm.transformers_utils.tokenizer": {"get_tokenizer": get_tokenizer},
    "vllm.utils": {"Counter": Counter, "resolve_obj_by_qualname": resolve_obj_by_qualname},
}
"""The names of each module that existed there in vLLM 0.11 to 0.15, as the same objects of today's vLLM."""


class ClassicIOProcessor(IOProcessor):
    """The base class as it was: its constructor takes only the configuration."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def validate_or_generate_params(self, params: Any = None) -> Any:
        return params or PoolingParams()


@contextlib.contextmanager
def classic_names() -> Iterator[None]:
    """Supply the names while the context lasts; modules that exist keep the names they have."""
    added: list[tuple[ModuleType, str]] = []
    new_modules: list[str] = []
    base, interface.IOProcessor = interface.IOProcessor, ClassicIOProcessor
    try:
        for path, names in MOVED.items():
            module = sys.modules.get(path)
            if module is None:
                module = sys.modules[path] = ModuleType(path)
                new_modules.append(path)
            for name, value in names.items():
                if not hasattr(module, name):
                    setattr(module, name, value)
                    added.append((module, name))
        yield
    finally:
        interface.IOProcessor = base
        for module, name in added:
            delattr(module, name)
        for path in new_modules:
            del sys.modules[path]

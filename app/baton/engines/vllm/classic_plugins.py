"""The names that IO processor plugins written for vLLM 0.11 to 0.15 import, and the base class of then.

Only where an engine says `classic_plugin = true`, and only while its plugin is imported.
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
"""Module by module what stood there between 0.11 and 0.15, and stands elsewhere now: the same objects."""


class ClassicIOProcessor(IOProcessor):
    """The base class as it was: made with the config alone."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def validate_or_generate_params(self, params: Any = None) -> Any:
        return params or PoolingParams()


@contextlib.contextmanager
def classic_names() -> Iterator[None]:
    """Supply the names for as long as the context lasts; modules that exist keep what they have."""
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

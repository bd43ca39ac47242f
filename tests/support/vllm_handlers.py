"""vLLM's own serving handlers on an engine that generates nothing: what they do before an engine is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from vllm.renderers import renderer_from_config
from vllm.v1.engine.input_processor import InputProcessor

from baton.config.groups import EngineSettings
from baton.engines.vllm import arguments, handlers
from baton.engines.vllm.client import WatchedClient
from baton.errors import InvalidRequest


class UnaskedEngine:
    """What vLLM's serving handlers see of an engine; it notes what it was given, and refuses it."""

    errored = False

    def __init__(self, settings: EngineSettings) -> None:
        self.vllm_config = arguments.engine_args(settings, settings.model).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.prompts: list[Any] = []
        self.grammars: list[Any] = []

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    def check_admission(self, _count: int = 1) -> None:
        pass

    async def generate(self, prompt: Any, params: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.prompts.append(prompt)
        self.grammars.append(params.structured_outputs)
        raise InvalidRequest("enough")
        yield


async def handlers_on(engine: UnaskedEngine, settings: EngineSettings) -> handlers.Handlers:
    """Build the handlers as the gateway does."""
    client = WatchedClient(engine, None)  # type: ignore[arg-type]  # stands for an engine
    return await handlers.Handlers.build(client, arguments.serving_namespace(settings))

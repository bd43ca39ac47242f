"""A plugin of the classic contract: a vector's length and norm for each text.

Its imports, its constructor of one argument and its method names are those of vLLM's reference plugin
and of TerraTorch's at vLLM 0.11; `validate_or_generate_params` came with 0.12. Nothing here knows of a
later vLLM: run it where those names exist.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pydantic import BaseModel
from vllm.config import VllmConfig
from vllm.entrypoints.openai.protocol import IOProcessorRequest, IOProcessorResponse
from vllm.inputs.data import PromptType
from vllm.outputs import PoolingRequestOutput
from vllm.plugins.io_processors.interface import IOProcessor, IOProcessorInput, IOProcessorOutput
from vllm.pooling_params import PoolingParams


class EchoRequest(BaseModel):
    """The request's data; `raise_in` and `sleep_in` name a step: parse, pre or post.

    `junk` answers what no JSON can hold.
    """

    text: list[str]
    raise_in: str | None = None
    sleep_in: str | None = None
    seconds: float = 0.0
    junk: bool = False


class EchoAnswer(BaseModel):
    """One vector a text, in the texts' order."""

    lengths: list[int]
    norms: list[float]
    request_id: str | None = None


class ClassicEcho(IOProcessor):
    """Keeps its requests on itself by their id, as the published plugins did."""

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self.requests: dict[str | None, EchoRequest] = {}

    def parse_request(self, request: Any) -> IOProcessorInput:
        data = request.data if isinstance(request, IOProcessorRequest) else request
        if not isinstance(data, dict):
            raise ValueError("Unable to parse the request data")
        wanted = EchoRequest(**data)
        self._meddle(wanted, "parse")
        return wanted

    def validate_or_generate_params(self, params: Any = None) -> PoolingParams:
        return params or PoolingParams(task="embed")

    def pre_process(
        self, prompt: IOProcessorInput, request_id: str | None = None, **kwargs: Any
    ) -> PromptType | Sequence[PromptType]:
        self._meddle(prompt, "pre")
        self.requests[request_id] = prompt
        return [{"prompt": text} for text in prompt.text]

    async def pre_process_async(
        self, prompt: IOProcessorInput, request_id: str | None = None, **kwargs: Any
    ) -> PromptType | Sequence[PromptType]:
        await self._pause(prompt, "pre")
        return self.pre_process(prompt.model_copy(update={"seconds": 0.0}), request_id, **kwargs)

    def post_process(
        self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None, **kwargs: Any
    ) -> IOProcessorOutput:
        prompt = self.requests.pop(request_id)
        self._meddle(prompt, "post")
        if prompt.junk:
            return object()
        vectors = [output.outputs.data.float().flatten() for output in model_output]
        return EchoAnswer(
            lengths=[len(vector) for vector in vectors],
            norms=[float(vector.norm()) for vector in vectors],
            request_id=request_id,
        )

    async def post_process_async(
        self,
        model_output: AsyncGenerator[tuple[int, PoolingRequestOutput]],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> IOProcessorOutput:
        outputs = sorted([pair async for pair in model_output], key=lambda pair: pair[0])
        await self._pause(self.requests[request_id], "post")
        self.requests[request_id].seconds = 0.0
        return self.post_process([output for _, output in outputs], request_id, **kwargs)

    def output_to_response(self, plugin_output: IOProcessorOutput) -> IOProcessorResponse:
        return IOProcessorResponse(request_id=getattr(plugin_output, "request_id", None), data=plugin_output)

    def _meddle(self, prompt: EchoRequest, step: str) -> None:
        """Fails or blocks here, if the request asks for it."""
        if prompt.sleep_in == step:
            time.sleep(prompt.seconds)
        if prompt.raise_in == step:
            raise RuntimeError(f"raised in {step}, as asked")

    async def _pause(self, prompt: EchoRequest, step: str) -> None:
        if prompt.sleep_in == step:
            await asyncio.sleep(prompt.seconds)

"""A gateway's vLLM engine whose tokens are given: all of vLLM but the model and its scheduler answers.

Rendering, sampling parameters, the stop of a token, detokenizing, stop strings and the shapes of answers are vLLM's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import httpx
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request

from baton.config.groups import EngineSettings
from baton.config.settings import load_settings
from baton.engines.backend import EngineState, Json, Operation, Reply, Report
from baton.engines.vllm import arguments
from baton.engines.vllm.engine import VllmEngine
from baton.engines.vllm.engine_thread import Starts
from baton.models.store import ModelStore
from baton.telemetry.ids import RequestContext
from support.gateways import run_fake

LONGEST = 64
"""Tokens of an answer without a limit."""


class ScriptedClient:
    """What the gateway sees of vLLM's client.

    Attributes:
        said: the tokens of the next answers, each repeated until the answer ends.
        prompts: token ids of all prompts so far.
        tokens_a_step: tokens that reach the detokenizer at once, as with speculative decoding.
    """

    errored = False
    output_handler = None

    def __init__(self, settings: EngineSettings) -> None:
        self.vllm_config = arguments.engine_args(settings, settings.model).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.output_processor = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self.said: deque[Sequence[int]] = deque()
        self.prompts: list[list[int]] = []
        self.tokens_a_step = 1

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    def check_admission(self, *_: object) -> None:
        pass

    def get_num_unfinished_requests(self) -> int:
        return 0

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        request = self.input_processor.process_inputs(
            request_id, prompt, params, supported_tasks=("generate",)
        )
        self.input_processor.assign_request_id(request)
        self.prompts.append(list(request.prompt_token_ids or ()))
        queue = RequestOutputCollector(params.output_kind, request.request_id)
        said = self.said.popleft() if self.said else [*self.renderer.tokenizer.encode("ok")]
        for each in self._children(request, queue):
            for output in self._steps(each, said):
                aborted = self.output_processor.process_outputs([output]).reqs_to_abort
                if (found := queue.get_nowait()) is not None:
                    assert isinstance(found, RequestOutput)
                    yield found
                if aborted:
                    self.output_processor.abort_requests(aborted, internal=True)
                    break

    def _children(self, request: Any, queue: RequestOutputCollector) -> list[Any]:
        """The requests to the engine: one for each of `n` answers."""
        if request.params.n == 1:
            self.output_processor.add_request(request, None, None, 0, queue)
            return [request]
        parent, children = ParentRequest(request), []
        for index in range(request.params.n):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self.output_processor.add_request(child, None, parent, index, queue)
            children.append(child)
        return children

    def _steps(self, request: Any, said: Sequence[int]) -> list[EngineCoreOutput]:
        """The steps of one answer, which the scheduler's own rule ends."""
        core, steps = Request.from_engine_core_request(request, None), list[EngineCoreOutput]()
        for number, token in enumerate(islice(cycle(said), LONGEST)):
            if number % self.tokens_a_step == 0:
                steps.append(EngineCoreOutput(request.request_id, []))
            core.append_output_token_ids(token)
            steps[-1].new_token_ids.append(token)
            if check_stop(core, self.model_config.max_model_len):
                steps[-1].finish_reason = core.get_finished_reason()
                steps[-1].stop_reason = core.stop_reason
                break
        return steps


class ScriptedEngine(VllmEngine):
    """A vLLM engine without a model.

    Attributes:
        client: what stands for vLLM's client; there from the start on.
    """

    client: ScriptedClient

    async def start(self, report: Report) -> None:
        self.client = ScriptedClient(self._settings)
        self._running = await self._build(self.client, report)  # type: ignore[arg-type]  # stands for vLLM's
        self._cards = await self._running.serving.cards()
        self._state = EngineState.READY

    async def call(
        self,
        operation: Operation,
        body: Json,
        context: RequestContext,
        transfer: Any = None,
        chooser: Any = None,
        adapter: Any = None,
    ) -> Reply:
        if transfer is not None:
            transfer.report.save_over.set()  # there is no KV to wait for
        return await super().call(operation, body, context, transfer, chooser, adapter)

    def text(self, tokens: Sequence[int]) -> str:
        """What token ids say, special tokens too."""
        found: str = self.client.renderer.tokenizer.decode(list(tokens))
        return found


@dataclass(frozen=True)
class ScriptedGateway:
    """A gateway with one engine, `a`, whose answers are given."""

    engine: ScriptedEngine
    http: httpx.Client

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.engine.client.renderer.tokenizer.encode(text, add_special_tokens=False)
        return found

    def says(self, text: str) -> None:
        """Give the engine the tokens of its next answer, which it ends."""
        self.engine.client.said.append([*self.tokens(text), *self.tokens("<|im_end|>")])

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json={"model": "a"} | body)


@contextmanager
def run_scripted(**serving: Any) -> Iterator[ScriptedGateway]:
    """Run a gateway whose engine has SmolLM2's tokenizer and template.

    Args:
        serving: vLLM's serving options.
    """
    model = str(ModelStore(load_settings().models_folder).resolve("smollm2"))
    settings = EngineSettings(name="a", model=model, handoff=True, serving=serving)
    engine = ScriptedEngine(settings, model, salt=lambda _tenant: None, starts=Starts())
    with run_fake(engine, handoffs={"auto": "off"}) as running, running.client() as http:
        yield ScriptedGateway(engine, http)

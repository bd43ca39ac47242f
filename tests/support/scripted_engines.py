"""A gateway's vLLM engine whose tokens are given: all of vLLM but the model and its scheduler answers.

Rendering, sampling parameters, the stop of a token, detokenizing, stop strings and the shapes of answers are vLLM's own.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
from openai_harmony import load_harmony_encoding
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import PrefillStats
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

BLOCK = 16
"""Tokens of a block of the prefix cache."""
TINY_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 4096,
    "eos_token_id": 200_002,
    "torch_dtype": "bfloat16",
}
LONGEST = 64
"""Tokens of an answer without a limit, unless more are given."""


class ScriptedClient:
    """What the gateway sees of vLLM's client.

    Attributes:
        said: the tokens of the next answers, each repeated until the answer ends.
        prompts: token ids of all prompts so far.
        used: of each prompt, its tokens and those of them that a prefix cache had.
        writes: writes an answer to the text of its prompt; None: answers are `said`.
        longest: tokens of an answer without a limit.
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
        self.writes: Callable[[str], str] | None = None
        self.used: list[tuple[int, int]] = []
        self._blocks: set[int] = set()
        self.longest = LONGEST
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
        said, cached = self._answer(self.prompts[-1]), self._cached(self.prompts[-1])
        for each in self._children(request, queue):
            for number, output in enumerate(self._steps(each, said)):
                if not number:
                    output.prefill_stats = PrefillStats(num_cached_tokens=cached)
                aborted = self.output_processor.process_outputs([output]).reqs_to_abort
                if (found := queue.get_nowait()) is not None:
                    assert isinstance(found, RequestOutput)
                    yield found
                if aborted:
                    self.output_processor.abort_requests(aborted, internal=True)
                    break

    def _answer(self, prompt: list[int]) -> Sequence[int]:
        tokenizer = self.renderer.tokenizer
        if self.writes is not None:
            text = self.writes(tokenizer.decode(prompt))
            return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        return self.said.popleft() if self.said else [*tokenizer.encode("ok")]

    def _cached(self, prompt: list[int]) -> int:
        """Count the tokens that a prefix cache has of a prompt: the whole blocks that an earlier one began with."""
        found, known, before = 0, True, 0
        for end in range(BLOCK, len(prompt), BLOCK):
            before = hash((before, *prompt[end - BLOCK : end]))
            known = known and before in self._blocks
            found = end if known else found
            self._blocks.add(before)
        self.used.append((len(prompt), found))
        return found

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
        for number, token in enumerate(islice(cycle(said), max(self.longest, len(said)))):
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

    def _streams_of(self, client: Any) -> None:
        """None: it loses no core."""

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
    url: str
    encode: Callable[[str], list[int]] | None = None

    def tokens(self, text: str) -> list[int]:
        if self.encode is not None:
            return self.encode(text)
        found: list[int] = self.engine.client.renderer.tokenizer.encode(text, add_special_tokens=False)
        return found

    def says(self, text: str) -> None:
        """Give the engine the tokens of its next answer, which it ends."""
        end: int = self.engine.client.renderer.get_eos_token_id()
        self.engine.client.said.append([*self.tokens(text), end])

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json={"model": "a"} | body)


def speaking(folder: Path, tokens: Sequence[str]) -> Path:
    """Make a model in a folder, without weights: SmolLM2's description, with further tokens."""
    known = Path(ModelStore(load_settings().models_folder).resolve("smollm2"))
    shutil.copytree(known, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    tokenizer.save(file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": tokenizer.get_vocab_size()}))
    return folder


def speaking_harmony(folder: Path, vocabulary: Path) -> Callable[[str], list[int]]:
    """Make a tiny gpt-oss in a folder, without weights; return what makes tokens of its texts.

    Args:
        vocabulary: OpenAI's file `o200k_base.tiktoken`.
    """
    rows = [line.split() for line in vocabulary.read_bytes().splitlines()]
    letters = _letters()
    words = {"".join(letters[byte] for byte in base64.b64decode(text)): int(at) for text, at in rows}
    encoding = load_harmony_encoding("HarmonyGptOss")
    tokenizer = Tokenizer(WordLevel(words, unk_token="!"))
    tokenizer.decoder = ByteLevel()
    special = [encoding.decode([number]) for number in range(len(rows), 200_019)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|return|>").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(TINY_GPT_OSS))
    return lambda text: list(encoding.encode(text, allowed_special="all"))


def _letters() -> list[str]:
    """The letter that stands for each byte in a vocabulary of bytes."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


@contextmanager
def run_scripted(
    aliases: tuple[str, ...] = (),
    model: Path | None = None,
    args: dict[str, Any] | None = None,
    encode: Callable[[str], list[int]] | None = None,
    **serving: Any,
) -> Iterator[ScriptedGateway]:
    """Run a gateway whose engine has SmolLM2's tokenizer and template, or a model's.

    Args:
        aliases: further names of the engine.
        model: folder of its description; None: SmolLM2's.
        args: vLLM's arguments of an engine.
        encode: makes tokens of texts in the tokenizer's place.
        serving: vLLM's serving options.
    """
    folder = str(model or ModelStore(load_settings().models_folder).resolve("smollm2"))
    settings = EngineSettings(
        name="a", aliases=aliases, model=folder, handoff=True, args=args or {}, serving=serving
    )
    engine = ScriptedEngine(settings, folder, salt=lambda _tenant: None, starts=Starts())
    with run_fake(engine, handoffs={"auto": "off"}) as running, running.client() as http:
        yield ScriptedGateway(engine, http, running.url, encode)

"""Which requests go on after an engine's loss, and that nothing of them is kept: on vLLM's own front end, without a core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from baton.config.groups import EngineSettings
from baton.engines.adapters import Adapter
from baton.engines.backend import EngineState
from baton.engines.transfers import TransferRequest
from baton.engines.vllm import engine
from baton.engines.vllm.engine import VllmEngine
from baton.engines.vllm.engine_thread import Starts
from baton.engines.vllm.lora import Loaded
from baton.engines.vllm.resume import STATELESS, Streams, continued, hindrance, unsure
from baton.errors import EngineUnavailable
from baton.telemetry.ids import Cut

pytestmark = [pytest.mark.fault("A15"), pytest.mark.anyio]


class Core:
    """What is sent to an engine's core."""

    def __init__(self) -> None:
        self.got: list[EngineCoreRequest] = []
        self.ended: list[str] = []

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.got.append(request)

    async def abort_requests_async(self, requests: list[str]) -> None:
        self.ended += requests


class Client:
    """vLLM's front end of one engine, whose core is the test."""

    def __init__(self) -> None:
        self.engine_core, self.lost = Core(), False
        self.output_processor = OutputProcessor(None, log_stats=False)

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, **options: Any
    ) -> RequestOutputCollector:
        if self.lost:
            raise EngineDeadError()
        request = EngineCoreRequest(
            request_id, list(prompt), None, params, None, 0.0, options.get("lora_request"), None, None
        )
        request.external_req_id = request_id
        queue = RequestOutputCollector(params.output_kind, request_id)
        self.output_processor.add_request(request, None, None, 0, queue)
        await self.engine_core.add_request_async(request)
        return queue

    async def abort(self, request_id: str, internal: bool) -> None:
        self.output_processor.abort_requests([request_id], internal)

    def _run_output_handler(self) -> None:
        """The test says what the core does."""

    def says(self, request_id: str, *tokens: int, ends: bool = False) -> None:
        output = EngineCoreOutput(
            request_id, list(tokens), finish_reason=FinishReason.LENGTH if ends else None
        )
        self.output_processor.process_outputs([output])

    def dies(self) -> None:
        self.lost = True
        self.output_processor.propagate_error(EngineDeadError())


class House:
    """Engines one after the other: when one is lost, the next goes on."""

    def __init__(self, count: int) -> None:
        self.clients = [Client() for _ in range(count)]
        self.resumed = 0
        self.streams = [
            Streams(client, self._find(at), lambda _tag, _transfer: None, self._count, f"e{at}")  # type: ignore[arg-type]
            for at, client in enumerate(self.clients)
        ]

    def _find(self, at: int) -> Callable[[Callable[[Streams], bool]], Any]:
        async def find(fits: Callable[[Streams], bool]) -> Streams | None:
            return next((each for each in self.streams[at + 1 :] if fits(each)), None)

        return find

    def _count(self) -> None:
        self.resumed += 1

    def ask(self, **more: Any) -> AsyncIterator[RequestOutput]:
        params = SamplingParams(max_tokens=8, output_kind=RequestOutputKind.DELTA, detokenize=False)
        for name, value in more.pop("params", {}).items():
            setattr(params, name, value)
        return self.streams[0].generate([1, 2, 3], params, "r", **more)


async def some(outputs: AsyncIterator[RequestOutput]) -> list[int]:
    return list((await anext(outputs)).outputs[0].token_ids)


async def test_it_goes_on_behind_what_was_said_and_nothing_of_it_is_kept() -> None:
    house = House(3)
    first, second, third = house.clients
    outputs = house.ask(params={"seed": 2**63 - 1, "min_tokens": 3})
    reading = asyncio.ensure_future(some(outputs))
    await asyncio.sleep(0)
    first.says("r", 10)
    assert await reading == [10]
    first.says("r", 11, 12)
    first.dies()  # before 11 and 12 were read
    assert await some(outputs) == [11, 12]
    (going_on,) = second.engine_core.got
    assert going_on.prompt_token_ids == [1, 2, 3, 10, 11, 12]
    assert going_on.sampling_params is not None
    assert (going_on.sampling_params.max_tokens, going_on.sampling_params.min_tokens) == (5, 0)
    assert going_on.sampling_params.seed == 2, "of 63 bits"
    second.says("r", 13)
    assert await some(outputs) == [13]
    second.dies()
    reading = asyncio.ensure_future(some(outputs))
    await asyncio.sleep(0.01)
    assert third.engine_core.got[0].prompt_token_ids == [1, 2, 3, 10, 11, 12, 13], "once"
    third.says("r", 14, ends=True)
    assert await reading == [14]
    with pytest.raises(StopAsyncIteration):
        await anext(outputs)
    assert house.resumed == 2
    assert not any(client.output_processor.request_states for client in house.clients)
    assert not third_kept(house)


async def test_one_that_is_ended_where_it_stands_says_all_that_the_core_has_said() -> None:
    """Its stream ends with it, nothing of it is kept, and the core is told to stop."""
    house, cut = House(2), Cut()
    outputs = house.ask(cut=cut)
    reading = asyncio.ensure_future(some(outputs))
    await asyncio.sleep(0)
    house.clients[0].says("r", 10)
    assert await reading == [10]
    house.clients[0].dies()
    reading = asyncio.ensure_future(some(outputs))  # it goes on at the second
    await asyncio.sleep(0.01)
    house.clients[1].says("r", 11, 12)
    read_as(house.clients[1], "as text")
    assert cut.end is not None
    assert cut.end()
    assert not cut.end(), "it has ended"
    house.clients[1].says("r", 13)  # nobody reads that any more
    assert await reading == [11, 12]
    with pytest.raises(StopAsyncIteration):
        await anext(outputs)
    assert (cut.prompt, cut.said, cut.why, cut.end) == ([1, 2, 3], [10, 11, 12], None, None)
    assert house.clients[1].engine_core.ended == ["r"]
    assert not house.clients[1].output_processor.request_states
    assert not third_kept(house)


@pytest.mark.parametrize(
    ("params", "transfer", "why"),
    [
        ({"seed": 4, "temperature": 1.0}, None, "random numbers"),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, None, "grammar"),
        ({"presence_penalty": 1.0}, None, "presence_penalty"),
        ({"n": 2}, None, "several answers"),
        ({}, TransferRequest(salt="other"), "KV that was moved"),
        ({"seed": 4, "temperature": 0.0}, None, None),
    ],
)
@pytest.mark.fault("A20")
async def test_what_another_request_could_not_know_is_not_handed_on(
    params: dict[str, Any], transfer: TransferRequest | None, why: str | None
) -> None:
    house, cut = House(1), Cut()
    outputs = house.ask(params=params, cut=cut, transfer=transfer)
    reading = asyncio.ensure_future(some(outputs))
    await asyncio.sleep(0)
    house.clients[0].says("r", 10)
    await reading
    state = read_as(house.clients[0], "as text")
    if params.get("n"):  # as `ParentRequest` makes of it
        state.parent_req = SimpleNamespace(get_outputs=lambda *_: ([], False), external_req_id="r")
    assert cut.end is not None
    assert cut.end()
    assert (why or "") in (cut.why or ""), cut.why
    assert bool(cut.said) == (why is None)


@pytest.mark.parametrize(
    ("said", "hands_on"), [("It ends. \n", False), ("It ends. Us", False), ("It ends", True)]
)
@pytest.mark.fault("A20")
def test_text_that_may_end_within_a_stop_string_is_not_handed_on(said: str, hands_on: bool) -> None:
    params = SamplingParams(stop=["\nUser:", "User"])
    request = EngineCoreRequest("r", [1], None, params, None, 0.0, None, None, None)
    text: Any = SimpleNamespace(detokenizer=SimpleNamespace(output_token_ids=[5], output_text=said))
    assert (unsure(request, text, None) is None) is hands_on


def read_as(client: Client, text: str) -> Any:
    """Have the only request of an engine read as a text; there is no tokenizer here."""
    (state,) = client.output_processor.request_states.values()
    state.detokenizer.output_text = text  # type: ignore[union-attr]
    return state


def third_kept(house: House) -> dict[str, Any]:
    return house.streams[-1]._sent | {str(key): value for key, value in house.streams[-1]._unread.items()}


async def test_one_under_which_a_third_engine_is_lost_is_taken_to_be_the_cause() -> None:
    house = House(4)
    outputs = house.ask()
    reading = asyncio.ensure_future(some(outputs))
    for client in house.clients[:3]:
        await asyncio.sleep(0.01)
        client.dies()
    with pytest.raises(EngineDeadError):
        await reading
    assert house.resumed == 2
    assert not house.clients[3].engine_core.got


async def test_one_that_moves_to_an_engine_as_that_is_lost_moves_once_more() -> None:
    house = House(3)
    first, second, third = house.clients
    outputs = house.ask()
    reading = asyncio.ensure_future(some(outputs))
    await asyncio.sleep(0)
    first.says("r", 10)
    assert await reading == [10]

    async def refuse(_request: EngineCoreRequest) -> None:
        raise EngineDeadError

    house.streams[1]._send = refuse
    reading = asyncio.ensure_future(some(outputs))
    await asyncio.sleep(0)
    first.dies()
    await asyncio.sleep(0.01)
    assert not second.engine_core.got
    assert not second.output_processor.request_states
    assert third.engine_core.got[0].prompt_token_ids == [1, 2, 3, 10]
    third.says("r", 11, ends=True)
    assert await reading == [11]
    assert house.resumed == 2


async def test_one_that_was_alone_takes_no_others_with_it() -> None:
    """It may be the cause: at an engine with others it would end them too."""
    house = House(3)
    busy = EngineCoreRequest("b", [1], None, SamplingParams(detokenize=False), None, 0.0, None, None, None)
    busy.external_req_id = "b"
    house.clients[1].output_processor.add_request(busy, None, None, 0, None)
    reading = asyncio.ensure_future(some(house.ask()))
    await asyncio.sleep(0)
    house.clients[0].dies()
    await asyncio.sleep(0.01)
    assert not house.clients[1].engine_core.got
    house.clients[2].says("r", 10)
    assert await reading == [10]

    house = House(2)
    house.clients[1].output_processor.add_request(busy, None, None, 0, None)
    house.clients[0].output_processor.add_request(
        busy, None, None, 0, RequestOutputCollector(busy.sampling_params.output_kind, "b")
    )  # type: ignore[union-attr]
    reading = asyncio.ensure_future(some(house.ask()))
    await asyncio.sleep(0)
    house.clients[0].dies()  # under two
    await asyncio.sleep(0.01)
    house.clients[1].says("r", 10)
    assert await reading == [10]


class Adapters:
    """The LoRA adapters of one engine, under numbers of its own."""

    def __init__(self, house: House, at: int, number: int) -> None:
        self.ended = list[Loaded]()
        self.loaded = Loaded(ADAPTER, LoRARequest("a", number, "/a"), self.ended.append)
        house.streams[at].adapter = self.of

    def of(self, adapter: Adapter) -> Loaded:
        if adapter != ADAPTER or self.loaded.leaves:
            raise EngineUnavailable
        return self.loaded


ADAPTER = Adapter("a", Path("/a"), "d" * 64, 1)


@pytest.mark.fault("A17")
@pytest.mark.parametrize("begun", [False, True])
async def test_it_goes_on_with_the_adapter_of_the_same_files_under_its_number_there(*, begun: bool) -> None:
    house = House(4)
    left, held = Adapters(house, 2, 3), Adapters(house, 3, 7)  # the second engine has none
    left.loaded.leaves = True
    house.clients[0].lost = not begun
    outputs = house.ask(adapter=ADAPTER, lora_request=LoRARequest("a", 1, "/a"))
    reading = asyncio.ensure_future(some(outputs))
    await asyncio.sleep(0.01)
    if begun:
        house.clients[0].says("r", 10)
        assert await reading == [10]
        reading = asyncio.ensure_future(some(outputs))
        await asyncio.sleep(0)
        house.clients[0].dies()
        await asyncio.sleep(0.01)
    assert not house.clients[1].engine_core.got
    assert not house.clients[2].engine_core.got
    (going_on,) = house.clients[3].engine_core.got
    assert going_on.lora_request is not None
    assert going_on.lora_request.lora_int_id == 7
    assert (held.loaded.running, held.ended) == (1, [])
    house.clients[3].says("r", 11, ends=True)
    assert await reading == [11]
    with pytest.raises(StopAsyncIteration):
        await anext(outputs)
    assert (held.loaded.running, held.ended) == (0, [held.loaded])


@pytest.mark.fault("A17")
async def test_it_ends_where_no_engine_has_its_adapter() -> None:
    house = House(2)
    house.clients[0].lost = True
    with pytest.raises(EngineDeadError):
        await anext(house.ask(adapter=ADAPTER, lora_request=LoRARequest("a", 1, "/a")))
    assert not house.clients[1].engine_core.got


@pytest.mark.fault("A18")
def test_images_go_along_under_names_of_their_own_unless_only_the_lost_engine_had_them() -> None:
    data: Any = object()
    image = MultiModalFeatureSpec(data, "image", "key", PlaceholderRange(offset=1, length=2), "name")
    request = EngineCoreRequest("r", [1, 5, 5], [image], SamplingParams(), None, 0.0, None, None, None)
    state: Any = SimpleNamespace(detokenizer=SimpleNamespace(output_token_ids=[9]))
    assert hindrance(request, state, None) is None
    again, once_more = (continued(request, state).mm_features or [] for _ in range(2))
    assert [(each.data, each.identifier, each.mm_position) for each in again] == [
        (data, "key", image.mm_position)
    ]
    assert len({image.mm_hash, again[0].mm_hash, once_more[0].mm_hash}) == 3, "no cache has it by this name"
    image.data = None
    assert "image" in (hindrance(request, state, None) or "")


@pytest.mark.fault("A18")
@pytest.mark.parametrize("item", [None, object()])
async def test_images_that_the_lost_engine_had_are_in_no_prompt(item: Any) -> None:
    house = House(2)
    house.clients[0].lost = True
    prompt = {"mm_hashes": {"image": ["x"]}, "mm_kwargs": {"image": [item]}}
    outputs = house.streams[0].generate(prompt, SamplingParams(detokenize=False), "r")
    reading = asyncio.ensure_future(some(outputs))
    await asyncio.sleep(0.01)
    if item is None:
        with pytest.raises(EngineDeadError):
            await reading
        return
    assert house.clients[1].engine_core.got
    house.clients[1].says("r", 10)
    assert await reading == [10]


@pytest.mark.fault("A19")
async def test_it_waits_no_longer_than_it_may_and_not_for_what_does_not_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = EngineSettings(name="a", model="m")
    mine = VllmEngine(settings, "m", salt=lambda _tenant: None, starts=Starts())
    now, looks = [0.0], list[float]()
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def sleep(seconds: float) -> None:
        looks.append(now[0])
        now[0] += seconds

    monkeypatch.setattr(engine, "asyncio", SimpleNamespace(sleep=sleep))
    mine._resume_s = 1.0
    mine.returns = lambda: False
    assert await mine._find_again(lambda _found: True) is None
    assert looks == [], "nothing will be ready"
    mine.returns = lambda: True
    assert await mine._find_again(lambda _found: True) is None
    assert 1.0 <= now[0] < 1.0 + 2 * engine.LOOK_EVERY_S
    ready: Any = SimpleNamespace(streams=object(), client=SimpleNamespace(errored=False))
    mine._state, mine._running, now[0] = EngineState.READY, ready, 0.0
    assert await mine._find_again(lambda found: found is ready.streams) is ready.streams
    assert await mine._find_again(lambda _found: False) is None


async def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    house = House(2)
    outputs = house.ask()
    reading = asyncio.ensure_future(some(outputs))
    await asyncio.sleep(0)
    house.clients[0].says("r", 10)
    await reading
    house.clients[0].dies()
    reading = asyncio.ensure_future(some(outputs))
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert not house.clients[1].output_processor.request_states
    assert not third_kept(house)


async def test_what_is_pooled_is_not_noted() -> None:
    house = House(1)
    pooled = EngineCoreRequest("p", [1], None, None, SimpleNamespace(), 0.0, None, None, None)  # type: ignore[arg-type]
    await house.clients[0].engine_core.add_request_async(pooled)
    assert not house.streams[0]._sent


@pytest.mark.parametrize("name", STATELESS)
def test_what_only_the_core_knew_is_told(name: str) -> None:
    request = EngineCoreRequest("r", [1], None, SamplingParams(), None, 0.0, None, None, None)
    state: Any = SimpleNamespace(detokenizer=SimpleNamespace(output_token_ids=[5]))
    assert hindrance(request, state, None) is None
    setattr(request.sampling_params, name, object())
    assert name in (hindrance(request, state, None) or "")
    state.detokenizer.output_token_ids = []
    assert hindrance(request, state, None) is None, "it begins anew"


def test_every_parameter_of_a_sample_is_decided() -> None:
    """A new one may depend on what was said: put it into `STATELESS` of resume.py, or here."""
    no_matter = {
        "n",
        "structured_outputs",  # core.py
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "logit_bias",
        "allowed_token_ids",
        "extra_args",
        "skip_reading_prefix_cache",
        "routed_experts_prompt_start",
    }
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields == no_matter | set(STATELESS)

"""A grammar in a core goes on behind what was said, wherever that was, as the lost core's would have."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.scripted_engines import speaking  # after the skip
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from baton.config.groups import EngineSettings
from baton.engines.vllm import arguments
from baton.engines.vllm.core import SAID_KEY, advance_grammars, with_core

pytestmark = [
    pytest.mark.fault("A16"),
    pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning"),  # vLLM's own
]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "t": {"type": "string"}},
    "required": ["n", "t"],
}
PROMPT = [1, 2, 3]


class Core:
    """The grammars of a core that thinks before it answers."""

    def __init__(self, folder: Path) -> None:
        settings = EngineSettings(name="a", model=str(folder), args={"reasoning_parser": "qwen3"})
        config = arguments.engine_args(settings, str(folder)).create_engine_config()
        self.config = config
        self.manager = StructuredOutputManager(config)
        advance_grammars(self.manager)
        self.encode = self.manager.tokenizer.encode
        self.end: int = self.manager.tokenizer.eos_token_id

    def request(self, said: list[int]) -> Request:
        """A request that goes on behind what was said."""
        made = StructuredOutputsParams(json=SCHEMA)
        made._backend = "xgrammar"
        params = SamplingParams(max_tokens=50, structured_outputs=made, extra_args={SAID_KEY: len(said)})
        params.update_from_generation_config({}, self.end)
        request = Request("r", [*PROMPT, *said], params, None)
        self.manager.grammar_init(request)
        begun: Any = request.structured_output_request
        if hasattr(begun._grammar, "exception"):
            begun._grammar.exception(10)
        return request

    def allows(self, request: Request, tokens: list[int]) -> bool:
        """Whether the request may say these next, one by one, as the scheduler asks it."""
        for token in tokens:
            request.append_output_token_ids(token)
            if not self.manager.accept_tokens(request, [token]):
                return False
        return True


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    made = Core(speaking(tmp_path_factory.mktemp("model"), ["<think>", "</think>"]))
    yield made
    made.manager.clear_backend()


@pytest.mark.parametrize("thought", ["", "<think>\nA number {\n</think>"], ids=["at once", "after thoughts"])
def test_it_goes_on_after_every_token(core: Core, thought: str) -> None:
    thoughts = core.encode(thought, add_special_tokens=False) if thought else core.encode("</think>")
    whole = [*thoughts, *core.encode('{"n": 17, "t": "a b"}', add_special_tokens=False), core.end]
    broken = core.encode("x", add_special_tokens=False)
    for at in range(1, len(whole)):
        request = core.request(whole[:at])
        grammar: Any = request.structured_output_request.grammar  # type: ignore[union-attr]
        assert not isinstance(grammar, Exception), at
        assert core.allows(request, whole[at:]), at
        assert grammar.is_terminated(), at
        if at >= len(thoughts) and at < len(whole) - 4:
            assert not core.allows(core.request(whole[:at]), [*broken, *whole[at:]]), at


def test_what_the_grammar_does_not_allow_ends_the_request(core: Core) -> None:
    said = core.encode('</think>{"n": "x', add_special_tokens=False)
    request = core.request(said)
    assert isinstance(request.structured_output_request.grammar, ValueError)  # type: ignore[union-attr]


def test_a_core_gets_it_with_its_configuration(core: Core) -> None:
    config = pickle.loads(pickle.dumps(with_core(core.config)))  # as it is sent to the core
    manager = SimpleNamespace(_create_grammar=lambda _request: "made")
    own = type(config.scheduler_config).__mro__[1].get_scheduler_cls(config.scheduler_config)
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "__init__", lambda _self, **parts: made.append(parts))
        config.scheduler_config.get_scheduler_cls()(structured_output_manager=manager)
    assert made == [{"structured_output_manager": manager}]
    params = SimpleNamespace(extra_args=None)
    assert manager._create_grammar(SimpleNamespace(sampling_params=params)) == "made"

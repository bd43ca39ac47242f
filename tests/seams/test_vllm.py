"""Every touch of vLLM's internals, held: these fail when a new vLLM moves them."""

from __future__ import annotations

import inspect
import json
import pkgutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tokenizers import Tokenizer, models, pre_tokenizers  # after the skip
from vllm.engine.protocol import EngineClient  # after the skip
from vllm.sampling_params import SamplingParams  # after the skip
from vllm.tokenizers import detokenizer_utils  # after the skip
from vllm.v1.engine import utils as engine_utils  # after the skip
from vllm.v1.engine.async_llm import AsyncLLM  # after the skip
from vllm.v1.executor import multiproc_executor  # after the skip
from vllm.v1.metrics import loggers  # after the skip
from vllm.v1.metrics.loggers import PrometheusStatLogger  # after the skip

from baton import errors  # after the skip
from baton.config.groups import EngineSettings  # after the skip
from baton.engines import vllm_version as version  # after the skip
from baton.engines.backend import ImageInput, Operation  # after the skip
from baton.engines.vllm import (
    arguments,  # after the skip
    handlers,  # after the skip
)
from baton.engines.vllm.client import (
    CURRENT_CALL,  # after the skip
    Call,
    WatchedClient,
    note_space_marker,
)
from baton.engines.vllm.series import FAMILIES, HELPERS, EngineSeries  # after the skip
from baton.errors import GenerationFailed  # after the skip
from baton.http import openapi  # after the skip
from baton.telemetry.ids import RequestContext  # after the skip


@pytest.mark.fault("E11")
@pytest.mark.parametrize(
    "splitter",
    [
        None,
        pre_tokenizers.ByteLevel(),
        pre_tokenizers.Metaspace(replacement="_"),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Metaspace()]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_how_a_space_is_marked_is_read_from_a_tokenizer_s_part_alone(splitter: Any) -> None:
    """vLLM itself reads all of it, at the first answer with log probabilities, on the event loop."""
    backend = Tokenizer(models.BPE())
    if splitter is not None:
        backend.pre_tokenizer = splitter
    ours, theirs = SimpleNamespace(backend_tokenizer=backend), SimpleNamespace(backend_tokenizer=backend)
    note_space_marker(ours)
    del ours.backend_tokenizer  # it is not asked again
    of_vllm = detokenizer_utils.get_leading_space_marker(theirs)
    assert vars(ours) == {detokenizer_utils._CACHED_MARKER_KEY: of_vllm}
    assert detokenizer_utils.get_leading_space_marker(ours) == of_vllm


def test_the_checked_in_schemas_are_vllm_s() -> None:
    # In a process of its own: names of schemas depend on what else is imported.
    script = "import json; from baton.engines.vllm.schemas import schemas; print(json.dumps(schemas()))"
    fresh = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert openapi._vllm_schemas() == json.loads(fresh.splitlines()[-1]), (
        "vLLM's protocol moved: run `make schemas`, read the difference"
    )


def test_every_operation_has_a_handler_that_vllm_has() -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.entrypoints.pooling.classify.serving import ServingClassification
    from vllm.entrypoints.pooling.embed.serving import ServingEmbedding
    from vllm.entrypoints.pooling.pooling.serving import ServingPooling
    from vllm.entrypoints.pooling.scoring.serving import ServingScores
    from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

    classes = {
        "openai_serving_completion": OpenAIServingCompletion,
        "openai_serving_chat": OpenAIServingChat,
        "openai_serving_responses": OpenAIServingResponses,
        "anthropic_serving_messages": AnthropicServingMessages,
        "serving_embedding": ServingEmbedding,
        "serving_pooling": ServingPooling,
        "serving_classification": ServingClassification,
        "serving_scores": ServingScores,
        "serving_tokenization": ServingTokenization,
    }
    assert set(handlers.HANDLERS) == set(Operation)
    source = inspect.getsource(handlers.init_app_state) + inspect.getsource(_factories())
    for route in handlers.HANDLERS.values():
        attribute, method = route.handler
        assert hasattr(classes[attribute], method)
        assert f"state.{attribute}" in source or attribute.startswith("serving_")
        parameters = list(inspect.signature(getattr(classes[attribute], method)).parameters)
        assert parameters[:3] in (["self", "request", "raw_request"], ["self", "args", "kwargs"])


def _factories() -> object:
    from vllm.entrypoints.generate import api_router

    return api_router.init_generate_state


def test_every_engine_client_method_passes_through_the_wrapper() -> None:
    class Engine:
        pass

    engine = Engine()
    for name in dir(EngineClient):
        if not name.startswith("_"):
            setattr(engine, name, f"the engine's {name}")
    wrapper = WatchedClient(engine, None)  # type: ignore[arg-type]  # only its attributes count
    for name in dir(EngineClient):
        if not name.startswith("_") and name not in ("generate", "encode"):
            assert getattr(wrapper, name) == f"the engine's {name}"
    for name in ("generate", "encode"):
        first = list(inspect.signature(getattr(AsyncLLM, name)).parameters)[:3]
        second = "sampling_params" if name == "generate" else "pooling_params"
        assert first == ["self", "prompt", second]


def test_the_salt_is_the_gateway_s_whatever_the_prompt_says() -> None:
    class Engine:
        def generate(self, prompt: dict[str, str], *_: object) -> object:
            self.prompt = prompt
            return _nothing()

    async def _nothing():  # type: ignore[no-untyped-def]  # never iterated
        yield None

    engine = Engine()
    for salt, expected in ((None, {}), ("ours", {"cache_salt": "ours"})):
        CURRENT_CALL.set(Call(RequestContext("id"), salt))
        WatchedClient(engine, None).generate({"cache_salt": "theirs"}, SamplingParams(), "id")  # type: ignore[arg-type]  # as above
        assert engine.prompt == expected


@pytest.mark.parametrize(
    ("known", "named", "taken"),
    [
        ({"a", "b"}, True, True),
        ({"b"}, True, False),
        (set(), True, False),
        (set(), False, False),
        ({"x"}, False, True),  # by settings of the engine's own it has another name there
        (None, True, True),  # vLLM's Messages handler drops what an image is called
    ],
)
def test_the_engine_is_given_no_image_that_was_not_read(
    known: set[str] | None, *, named: bool, taken: bool
) -> None:
    given: list[Any] = []

    async def nothing():  # type: ignore[no-untyped-def]  # never iterated
        yield None

    def take(prompt: Any, *_: object) -> Any:
        given.append(prompt)
        return nothing()

    renderer = SimpleNamespace(mm_processor_cache=None)
    client = WatchedClient(SimpleNamespace(generate=take, encode=take, renderer=renderer), None)  # type: ignore[arg-type]  # as above
    context = RequestContext("id", images=None if known is None else frozenset(known))
    prompt = {"mm_hashes": {"image": ["a"]}}
    for work, params in ((client.generate, SamplingParams()), (client.encode, None)):
        call = Call(context, images=ImageInput(limit=1, named=named))
        CURRENT_CALL.set(call)
        if taken:
            work(dict(prompt), params, "id")
            continue
        with pytest.raises(GenerationFailed):
            work(dict(prompt), params, "id")
        assert isinstance(call.failure, GenerationFailed)
    assert len(given) == 2 * taken


def test_the_output_handler_can_be_silenced_before_a_stop() -> None:
    assert "self.output_handler: asyncio.Task | None = None" in inspect.getsource(AsyncLLM.__init__)


def test_series_of_two_engines_live_side_by_side() -> None:
    for name in (*FAMILIES, *HELPERS):
        assert hasattr(PrometheusStatLogger, name), f"{name} moved"
    own = {name for name in vars(PrometheusStatLogger) if name.startswith("_") and name.endswith("_cls")}
    assert own == {*FAMILIES, *HELPERS}, "a new kind of series would be kept process-wide"
    several = [EngineSeries(), EngineSeries()]
    for series in several:
        logger = series.stat_logger()
        assert issubclass(logger, loggers.AggregateStatLoggerBase)
        logger._gauge_cls("vllm:x", "X.", labelnames=["engine"]).labels("0").set(1)
        helper = logger._spec_decoding_cls
        assert helper._counter_cls is logger._counter_cls
    assert all(series.registry.get_sample_value("vllm:x", {"engine": "0"}) == 1 for series in several)


def test_series_go_on_when_an_engine_is_started_anew() -> None:
    series = EngineSeries()
    for _ in range(2):
        logger = series.stat_logger()
        logger._counter_cls(name="vllm:y", documentation="Y.", labelnames=["engine"]).labels("0").inc()
        logger._gauge_cls(name="vllm:z", documentation="Z.", labelnames=["engine"]).labels("0").set(3)
    assert series.registry.get_sample_value("vllm:y_total", {"engine": "0"}) == 2
    series.forget_levels()
    assert series.registry.get_sample_value("vllm:z", {"engine": "0"}) is None


def test_arguments_are_checked_against_vllm_s_with_the_nearest_name() -> None:
    def build(**args: object) -> object:
        return arguments.engine_args(EngineSettings(name="a", model="m", args=args), "m")

    with pytest.raises(
        errors.SettingsError, match=r"args\.max_model_length: unknown to vLLM; did you mean 'max_model_len'"
    ):
        build(max_model_length=1)
    with pytest.raises(errors.SettingsError, match=r"args\.model: set by the engine's `model`"):
        build(model="x")
    built = build(max_model_len=128)
    assert (built.max_model_len, built.served_model_name) == (128, ["a"])  # type: ignore[attr-defined]  # AsyncEngineArgs


def test_serving_options_are_checked_and_exist_in_vllm() -> None:
    namespace = arguments.serving_namespace(
        EngineSettings(name="a", model="m", serving={"response_role": "x"})
    )
    assert namespace.response_role == "x"
    assert namespace.enable_prompt_tokens_details
    missing = {option for option in arguments.SERVING_OPTIONS if not hasattr(namespace, option)}
    assert missing <= {"reasoning_effort_map"}, "vLLM no longer has it"  # which vLLM 0.33 has
    with pytest.raises(errors.SettingsError, match="did you mean 'tool_call_parser'"):
        arguments.serving_namespace(EngineSettings(name="a", model="m", serving={"tool_parser": "x"}))


def test_arguments_vllm_itself_refuses_are_a_line() -> None:
    settings = EngineSettings(name="a", model="m", args={"compilation_config": {"bogus": 1}})
    with pytest.raises(errors.SettingsError, match="engines 'a': args: vLLM refuses them"):
        arguments.engine_args(settings, "m")


def test_media_are_fetched_from_nowhere_unless_the_operator_says_so() -> None:
    from vllm.multimodal.media.connector import MediaConnector

    domains = arguments.engine_args(EngineSettings(name="a", model="m"), "m").allowed_media_domains
    with pytest.raises(ValueError, match="allowed domains"):
        MediaConnector(allowed_media_domains=domains).fetch_image("http://169.254.169.254/x.png")


def test_the_version_that_is_checked_is_the_one_installed() -> None:
    assert version.minor_of(version.installed_vllm() or "") in version.VLLM_VERSIONS


def test_the_port_the_fleet_and_the_fake_import_no_vllm() -> None:
    script = "import sys, baton.engines.fake.engine, baton.engines.fleet, baton.server; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_what_few_gateways_use_is_imported_where_it_is_used() -> None:
    """A library that is broken or missing stops those who asked for what it does, and nobody else."""
    optional = {"accelerate", "gguf", "obstore", "rasterio", "ray", "torch", "transformers", "valkey", "vllm"}
    script = (
        "import sys, baton.cli, baton.doctor.machine, baton.serve, baton_geo, baton_latent, baton_vision; "
        "from baton.config.settings import Settings; from baton.doctor.machine import _far_stores; "
        f"assert list(_far_stores(Settings())) == []; print(sorted({optional} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_module_of_baton_imports() -> None:
    import importlib
    import importlib.util

    import baton

    def without_ray(name: str) -> None:
        assert name == "baton.ray"
        assert importlib.util.find_spec("ray") is None

    found = pkgutil.walk_packages(baton.__path__, "baton.", onerror=without_ray)
    names = [module.name for module in found]
    if importlib.util.find_spec("ray") is None:  # its tests say so by being skipped
        names.remove("baton.ray")
    assert "baton.engines.vllm.engine" in names
    for name in names:
        importlib.import_module(name)


def test_engines_start_afresh_and_read_their_environment() -> None:
    """glibc looks at how it is to keep memory when a program begins, so a forked engine would not."""
    script = (
        "from baton.config.settings import Settings; from baton.config.vllm_environment import apply_environment; "
        "apply_environment(Settings(), offline=True, compiles=False); "
        "from vllm.utils.system_utils import get_mp_context; print(get_mp_context().get_start_method())"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.split()[-1] == "spawn"
    for module in (engine_utils, multiproc_executor):
        assert "context = get_mp_context()" in inspect.getsource(module)

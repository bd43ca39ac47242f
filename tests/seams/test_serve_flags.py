"""Every flag of vLLM's serve parser after `baton serve MODEL`: honoured as vLLM would, or refused in one line."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from support.table_tests import each

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs  # after the skip
from vllm.utils.argparse_utils import FlexibleArgumentParser  # after the skip

from baton import cli  # after the skip
from baton.config.gpu_memory import USABLE_SHARE
from baton.config.groups import EngineSettings  # after the skip
from baton.engines.vllm import (
    arguments,  # after the skip
)
from baton.errors import SettingsError  # after the skip

MODEL = "org/model"
VALUES = {
    "lora_modules": "a=b",
    "kv_transfer_config": '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}',
    "reasoning_parser": "qwen3",
    "runner": "generate",
    "served_model_name": "word",
    "tool_call_parser": "hermes",
    "io_processor_plugin": "word",
}
"""Flags whose value must be a particular one to be accepted."""
ANY = ("17000000", "3", "0.5", "word", "{}", "[]", '{"a": 1}', "a=b")
"""Values of which one suits each of the other flags."""


def vllm_parser() -> FlexibleArgumentParser:
    parser = arguments.make_arg_parser(FlexibleArgumentParser(prog="vllm serve", add_help=False))

    def refuse(message: str) -> None:
        raise ValueError(message)

    parser.error = refuse
    return parser


PARSER = vllm_parser()
SERVE = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]  # a group
BATON_S_OWN = {text for parameter in SERVE.params for text in parameter.opts}
"""Flags that never reach vLLM's parser: `baton serve` has them itself."""
ACTIONS = {
    (action.option_strings[0] if not negated else negation): action
    for action in PARSER._actions
    for negation in (next((text for text in action.option_strings if text.startswith("--no-")), ""),)
    for negated in (False, True)
    if action.option_strings and (negation or not negated)
    if action.option_strings[0] not in BATON_S_OWN
}
"""Every flag by its first spelling, and every `--no-` form."""


def line_for(flag: str, action: argparse.Action) -> list[str]:
    """A command line with this flag that vLLM's own parser accepts."""
    if flag == "--model":
        return [flag, MODEL]
    if action.nargs == 0:
        return [MODEL, flag]
    choices = [str(choice) for choice in action.choices or ()]
    for value in (VALUES[action.dest],) if action.dest in VALUES else (*choices[-1:], *ANY):
        try:
            action.type(value) if callable(action.type) else value
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            continue
        return [MODEL, flag, value]
    raise AssertionError(f"no value of ANY suits {flag}")


def plain(value: object) -> object:
    """A value without the types that vLLM wraps around it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: plain(found) for key, found in vars(value).items() if key != "engine_id"}
    return value


ONE_PARSER = functools.cache(arguments.serve_parser)


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's parser takes a while to build, and is not changed by being used."""
    monkeypatch.setattr(arguments, "serve_parser", ONE_PARSER)


ENGINE = {field.name for field in dataclasses.fields(AsyncEngineArgs)}


@each("flag", ACTIONS)
def test_every_flag_of_vllm_s_is_honoured_or_refused_in_one_line(flag: str) -> None:
    action = ACTIONS[flag]
    line = line_for(flag, action)
    given = getattr(PARSER.parse_args(list(line)), action.dest)
    try:
        engine = arguments.settings_from_command_line(list(line))
        built = arguments.engine_args(engine, engine.model)
        namespace = arguments.serving_namespace(engine)
    except SettingsError as error:
        (told,) = error.message.splitlines()
        assert flag.removeprefix("--no-").lstrip("-").replace("-", "_") in told.replace("-", "_"), told
        assert "request" not in told.removeprefix(f"baton serve: {flag} ").partition(":")[0], told
        assert len(told) < 300, told
        return
    honoured = built if action.dest in ENGINE else namespace
    if action.dest == "served_model_name":
        assert (engine.name, engine.aliases) == (given[0], tuple(given[1:]))
    elif action.dest == "lora_modules":
        assert {name: str(folder) for name, folder in engine.adapters.items()} == {"a": "b"}
        assert built.enable_lora, "no adapter without it"
    elif action.dest == "model":
        assert engine.model == given
    elif action.dest == "kv_transfer_config":
        assert plain(built.kv_transfer_config) == plain(given)
    else:
        expected = (
            getattr(AsyncEngineArgs(model=MODEL, **{action.dest: given}), action.dest)
            if action.dest in ENGINE
            else given
        )
        assert plain(getattr(honoured, action.dest)) == plain(expected)


@pytest.mark.parametrize(
    ("line", "name", "args"),
    [
        (["org/model"], "model", {}),
        (["org/model", "--max-model-len", "4096"], "model", {"max_model_len": 4096}),
        (
            ["org/model", "--max-model-len", "4k", "--enforce-eager"],
            "model",
            {"max_model_len": 4000, "enforce_eager": True},
        ),
        (["./m", "--served-model-name", "mine", "--dtype", "float32"], "mine", {"dtype": "float32"}),
        (["--model", "org/model", "--seed", "3"], "model", {"seed": 3}),
        (["org/model", "--no-enforce-eager"], "model", {"enforce_eager": False}),
        (
            ["m", "--kv-transfer-config", '{"kv_connector": "ExampleConnector"}'],
            "m",
            {"kv_transfer_config": {"kv_connector": "ExampleConnector"}},
        ),
    ],
)
def test_a_model_and_vllm_s_flags_make_one_engine(
    line: list[str], name: str, args: dict[str, object]
) -> None:
    engine = arguments.settings_from_command_line(line)
    assert (engine.name, engine.args) == (name, args)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (["m", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["m", "--api-key", "x"], "use `baton keys create`"),
        (["m", "--max-model-len", "many"], "max-model-len"),
        (["--enforce-eager"], "no model is given"),
        (["m", "--headless"], "flag of vLLM's own server"),
        (["m", "--ssl-keyfile", "x"], "let a proxy before Baton do TLS"),
        (["m", "--middleware", "a.b"], "--middleware is not offered by Baton: "),
        (["m", "--kv-transfer-config", "[]"], "kv-transfer-config"),
        (["m", "--kv-transfer-config", "{"], "kv-transfer-config"),
        (["m", "--enable-log-requests"], "--enable-log-requests is not offered by Baton: "),
        (["."], "name"),
        (["m", "--served-model-name", "a b"], "name"),
        (["m", "--runner", "draft"], "runner"),
        (["m", "--kv-cache-memory-bytes", "1000"], "kv_cache_memory"),
    ],
)
def test_a_flag_that_does_not_fit_is_refused_in_a_line(line: list[str], reason: str) -> None:
    with pytest.raises(SettingsError) as caught:
        arguments.settings_from_command_line(line)
    assert reason in caught.value.message


def test_a_connector_of_the_command_line_stands_above_ours_field_by_field() -> None:
    line = ["m", "--kv-transfer-config", '{"kv_load_failure_policy": "fail"}']
    engine = arguments.settings_from_command_line(line, handoff=True)
    ours = {"kv_connector": "BatonConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    built = arguments.engine_args(engine, "m", ours).kv_transfer_config
    assert built is not None
    assert (built.kv_connector, built.kv_role, built.kv_load_failure_policy) == (
        "BatonConnector",
        "kv_both",
        "fail",
    )


def test_further_served_names_are_aliases() -> None:
    engine = arguments.settings_from_command_line(["m", "--served-model-name", "a", "b", "c"])
    assert (engine.name, engine.aliases) == ("a", ("b", "c"))
    assert arguments.serving_namespace(engine).served_model_name == ["a", "b", "c"]
    assert arguments.engine_args(engine, "m").served_model_name == ["a"]  # what series are labelled with


def test_a_connector_s_settings_that_are_no_table_are_a_line() -> None:
    settings = EngineSettings(name="a", model="m", args={"kv_transfer_config": "ExampleConnector"})
    with pytest.raises(SettingsError, match=r"args\.kv_transfer_config: must be a table"):
        arguments.engine_args(settings, "m")


def test_a_share_of_a_gpu_is_vllm_s_own_argument_there_and_refused_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = EngineSettings(name="a", model="m", gpu_share=0.3)
    with pytest.raises(SettingsError, match="gpu_share: the installed vLLM runs on CPUs"):
        arguments.engine_args(settings, "m", gpu_share=0.3)
    monkeypatch.setattr(arguments, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert arguments.engine_args(settings, "m", gpu_share=0.3).gpu_memory_utilization == 0.3
    assert arguments.engine_args(settings, "m").gpu_memory_utilization == USABLE_SHARE, "vLLM's default"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"enable_log_requests": True}, "args.enable_log_requests: not supported: "),
        ({"allowed_media_domains": ["example.org"]}, "images.allowed_hosts"),
        ({"allowed_media_domains": []}, "images.allowed_hosts"),  # to vLLM: any
        ({"shutdown_timeout": 5}, "drain_timeout_s"),
        ({"data_parallel_backend": "ray"}, "args.data_parallel_backend: not supported: .* scale by replicas"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend: not supported: .* replicas"),
        ({"enable_log_requests": False, "shutdown_timeout": 0}, ""),  # what is so anyway
    ],
)
def test_an_argument_that_only_vllm_s_own_server_acts_on_is_a_line(args: dict[str, Any], reason: str) -> None:
    settings = EngineSettings(name="a", model="m", args=args)
    if not reason:
        assert arguments.engine_args(settings, "m").shutdown_timeout == 0
        return
    with pytest.raises(SettingsError, match=reason):
        arguments.engine_args(settings, "m")

"""Every flag of vLLM's serve parser after `baton serve MODEL`: honoured as vLLM would, or one line says what to do."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from pathlib import Path
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
from baton.config.groups import CPU_KV_CACHE_BYTES, EngineSettings  # after the skip
from baton.config.settings import Settings, load_settings  # after the skip
from baton.engines.vllm import (
    arguments,  # after the skip
    flags,
)
from baton.errors import SettingsError  # after the skip

MODEL = "org/model"
VALUES = {
    "lora_modules": "a=b",
    "kv_transfer_config": '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}',
    "reasoning_parser": "qwen3",
    "reasoning_parser_plugin": __file__,
    "runner": "generate",
    "served_model_name": "word",
    "tool_call_parser": "hermes",
    "tool_parser_plugin": __file__,
    "io_processor_plugin": "word",
    "allowed_headers": '["X-Trace"]',
    "allowed_media_domains": "example.org",
    "allowed_methods": '["GET"]',
    "allowed_origins": '["https://app.example"]',
    "log_level": "DEBUG",
    "root_path": "/llm",
    "shutdown_timeout": "7",
    "sse_keep_alive_interval": "7",
    "ssl_cert_reqs": "2",
    "config": "x.yaml",
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
    monkeypatch.setattr(flags, "serve_parser", ONE_PARSER)


ENGINE = {field.name for field in dataclasses.fields(AsyncEngineArgs)}


@each("flag", ACTIONS)
def test_every_flag_of_vllm_s_is_honoured_or_refused_in_one_line(flag: str) -> None:
    action = ACTIONS[flag]
    line = line_for(flag, action)
    given = getattr(PARSER.parse_args(list(line)), action.dest)
    fate = flags.fate_of(action.dest)
    assert fate is not None, "say in baton.engines.vllm.flags what becomes of it"
    try:
        read = flags.read_command_line(line)
        engine = read.engine
        built = arguments.engine_args(engine, engine.model)
        namespace = arguments.serving_namespace(engine)
    except SettingsError as error:
        (told,) = error.message.splitlines()
        assert flag.removeprefix("--no-").lstrip("-").replace("-", "_") in told.replace("-", "_"), told
        assert "request" not in told.removeprefix(f"baton serve: {flag} ").partition(":")[0], told
        assert len(told) < 300, told
        reason = told.partition(" is not offered by Baton: ")[2]
        assert (fate.kind == "acts") is not bool(reason), told  # vLLM, or a setting, refuses the value
        assert reason in ("", fate.text), told
        return
    if action.dest in flags.GATEWAY:
        setting = flags.GATEWAY[action.dest]
        group, _, key = setting.rpartition(".")
        value = (read.gateway[group] if group else read.gateway)[key]
        named = flags.VALUES.get(action.dest)
        assert value == (named.get(given, given) if named else given)
        assert fate == flags.Fate("acts", f"`{setting}`")
        return
    if action.dest in flags.INSTEAD or action.dest in arguments.NOT_HONOURED:  # it asks for what is so
        assert given == flags.AS_IT_IS.get(action.dest, PARSER.get_default(action.dest))
        return
    assert fate.kind == "acts"
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
    engine = flags.read_command_line(line).engine
    assert (engine.name, engine.args) == (name, args)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            ["m", "--no-such-flag"],
            "baton serve: --no-such-flag: there is no such flag; `baton serve --help=WORD`",
        ),
        (["m", "--max-model-length", "9"], "did you mean '--max-model-len'?"),
        (["m", "--handof"], "did you mean '--handoff'?"),
        (
            ["m", "--max-modle-len=9"],
            "--max-modle-len: there is no such flag; did you mean '--max-model-len'?",
        ),
        (["m", "n"], "baton serve: n: neither a flag nor its value"),
        (
            ["m", "--task", "embed"],
            "baton serve: --task: vLLM has removed it: use `--runner` and `--convert`",
        ),
        (["m", "--device", "cpu"], "--device: vLLM has removed it: the installed vLLM build decides"),
        (["m", "--swap_space=4"], "--swap-space: vLLM has removed it: use `--kv-offloading-size`"),
        (["m", "--compilation-config.level"], "baton serve: "),
        (["m", "--api-key", "x"], "use `baton keys create`"),
        (["m", "--enable-sleep-mode"], "Baton has no route that puts an engine to sleep"),
        (
            ["m", "--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "/tmp"}'],
            "no route that starts a profile",
        ),
        (["m", "--profiler-config", '{"profiler": "torch"}'], "torch_profiler_dir must be set"),
        (["m", "--allowed-origins", "https://a"], "--allowed-origins: not JSON: 'https://a'"),
        (["m", "--enable-elastic-ep"], "Baton does not change an engine's ranks"),
        (["m", "--scheduling-policy", "priority"], "serves tenants in turns"),
        (["m", "--no-enable-prompt-tokens-details"], "always on: `usage` holds the cached tokens"),
        (["--uds", "/tmp/x"], "write `uds` there, not --uds here"),
        (["m", "--max-model-len", "many"], "max-model-len"),
        (["--enforce-eager"], "no model is given"),
        (["m", "--headless"], "start a gateway on each, over one shared store"),
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
        flags.read_command_line(line, own=["--handoff"])
    assert reason in caught.value.message
    assert "\n" not in caught.value.message


FLAGS = {text for action in PARSER._actions for text in action.option_strings}


@each("name", flags.REMOVED)
def test_a_removed_flag_is_gone_and_what_is_said_instead_is_there(name: str) -> None:
    if name.startswith("disable-") and f"--{name}" in FLAGS:
        return  # vLLM 0.33 writes `--disable-x` for `--no-enable-x`
    assert f"--{name}" not in FLAGS
    with pytest.raises(SettingsError, match=f"--{name}: vLLM has removed it: "):
        flags.read_command_line(["m", f"--{name}", "1"])
    for named in re.findall(r"`(--[a-z0-9-]+)", flags.REMOVED[name]):
        assert named in FLAGS, named


def test_each_flag_is_decided_once() -> None:
    dests = {action.dest for action in PARSER._actions}
    assert dests >= flags.INSTEAD.keys() | flags.GATEWAY.keys(), "of vLLM's flags"
    assert not flags.INSTEAD.keys() & flags.GATEWAY.keys()
    assert not flags.INSTEAD.keys() & arguments.NOT_HONOURED.keys()
    assert flags.AS_IT_IS.keys() <= flags.INSTEAD.keys()
    for setting in flags.GATEWAY.values():
        group, _, key = setting.rpartition(".")
        fields = Settings.model_fields
        assert key in (fields[group].annotation.model_fields if group else fields), setting  # type: ignore[union-attr]  # a group


def test_more_log_probabilities_are_allowed_at_the_gateway_too() -> None:
    read = flags.read_command_line(["m", "--max-logprobs", "100"])
    assert (read.engine.args["max_logprobs"], read.gateway) == (100, {"limits": {"logprobs": 100}})
    assert flags.read_command_line(["m", "--max-logprobs", "-1"]).gateway == {}, (
        "all of the vocabulary: not from here"
    )


def test_a_share_of_memory_decides_the_kv_pool_on_a_cpu_as_in_vllm() -> None:
    engine = flags.read_command_line(["m", "--gpu-memory-utilization", "0.3"]).engine
    built = arguments.engine_args(engine, "m")
    assert (built.gpu_memory_utilization, built.kv_cache_memory_bytes) == (0.3, None)
    assert (
        arguments.engine_args(flags.read_command_line(["m"]).engine, "m").kv_cache_memory_bytes
        == CPU_KV_CACHE_BYTES
    )


def test_a_yaml_file_is_read_as_vllm_reads_it_and_the_line_overrides_it(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(
        "model: org/model\nmax_model_len: 4k\nseed: 3\nenforce-eager: false\nserved-model-name: [a, b]\nport: 17\n"
        "log-level: INFO\nuvicorn-log-level: critical\ncompilation-config:\n  pass_config:\n    fuse_norm_quant: true\n"
    )
    read = flags.read_command_line(["--seed", "4"], file=file)
    assert (read.engine.model, read.engine.name, read.engine.aliases) == ("org/model", "a", ("b",))
    assert read.engine.args.pop("compilation_config").pass_config.fuse_norm_quant is True
    assert read.engine.args == {"max_model_len": 4000, "seed": 4, "enforce_eager": False}
    assert read.gateway == {"port": 17, "log_level": "info"}
    read = flags.read_command_line(["./other"], file=file)
    assert (read.engine.model, read.engine.args["seed"]) == ("./other", 3)


def test_what_is_wrong_in_a_yaml_file_is_told_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    for line, told in (
        (
            "max-model-length: 4",
            f"{file}: max-model-length: there is no such flag; did you mean '--max-model-len'?",
        ),
        ("max-model-len: many", f"{file}: argument --max-model-len: "),
        ("api-key: x", f"{file}: api-key is not offered by Baton: use `baton keys create`"),
        ("task: embed", f"{file}: task: vLLM has removed it: "),
    ):
        file.write_text(f"model: m\n{line}\n")
        with pytest.raises(SettingsError) as caught:
            flags.read_command_line([], file=file)
        assert caught.value.message.startswith(told), caught.value.message


def test_a_setting_that_a_flag_gave_is_told_by_the_flag() -> None:
    read = flags.read_command_line(["m", "--sse-keep-alive-interval", "-1", "--allowed-origins", '["x"]'])
    with pytest.raises(SettingsError) as caught:
        load_settings(**read.gateway)
    told = flags.told_by_flag(caught.value.message, read.flags).splitlines()
    assert told[0].startswith("baton serve: --sse-keep-alive-interval: input should be greater")
    assert told[1].startswith("baton serve: --allowed-origins: string should match")


def test_help_finds_flags_and_says_what_becomes_of_them() -> None:
    one_parser: Any = ONE_PARSER
    one_parser.cache_clear()  # the help writes into the parser
    try:
        groups = flags.help_text("listgroup")
        assert "ModelConfig" in groups
        assert "--help=GROUP" in groups
        assert "--max-model-len" not in groups
        found = " ".join(flags.help_text("keep-alive").split())
        assert "--sse-keep-alive-interval" in found
        assert "Sets `edge.keep_alive_s`." in found
        assert "Refused: Baton has no route that puts an engine to sleep" in " ".join(
            flags.help_text("enable_sleep").split()
        )
        every = flags.help_text("all")
        assert all(action.option_strings[0] in every for action in PARSER._actions if action.option_strings)
    finally:
        one_parser.cache_clear()


def test_a_plugin_s_tool_parser_is_known_by_its_name(tmp_path: Path) -> None:
    plugin = tmp_path / "house_parser.py"
    plugin.write_text(
        "from vllm.tool_parsers import ToolParser, ToolParserManager\n\n\n"
        "@ToolParserManager.register_module('of_this_house')\nclass House(ToolParser):\n    pass\n"
    )
    line = ["m", "--tool-parser-plugin", str(plugin), "--tool-call-parser", "of_this_house"]
    engine = flags.read_command_line(line).engine
    arguments.engine_args(engine, engine.model)
    assert arguments.serving_namespace(engine).tool_call_parser == "of_this_house"
    for kind in ("tool", "reasoning"):
        missing = flags.read_command_line(["m", f"--{kind}-parser-plugin", str(tmp_path / "none.py")]).engine
        with pytest.raises(SettingsError, match=rf"{kind}_parser_plugin: there is no file or module "):
            arguments.engine_args(missing, "m")


def test_the_scorer_of_late_interaction_is_off_in_the_engine_too() -> None:
    engine = flags.read_command_line(
        ["m", "--runner", "pooling", "--no-enable-flash-late-interaction"]
    ).engine
    built = arguments.engine_args(engine, "m")
    assert built.pooler_config is not None
    assert built.pooler_config.enable_flash_late_interaction is False
    assert arguments.serving_namespace(engine).enable_flash_late_interaction is False


def test_a_connector_of_the_command_line_stands_above_ours_field_by_field() -> None:
    line = ["m", "--kv-transfer-config", '{"kv_load_failure_policy": "fail"}']
    engine = flags.read_command_line(line, handoff=True).engine
    ours = {"kv_connector": "BatonConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    built = arguments.engine_args(engine, "m", ours).kv_transfer_config
    assert built is not None
    assert (built.kv_connector, built.kv_role, built.kv_load_failure_policy) == (
        "BatonConnector",
        "kv_both",
        "fail",
    )


def test_further_served_names_are_aliases() -> None:
    engine = flags.read_command_line(["m", "--served-model-name", "a", "b", "c"]).engine
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

"""Every flag of vLLM's serve parser after `baton serve MODEL`: honoured as vLLM would, or refused in one line."""

from __future__ import annotations

import argparse
import dataclasses
import functools

import pytest
import typer

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs  # after the skip
from vllm.entrypoints.launchers.cli_args import make_arg_parser  # after the skip
from vllm.utils.argparse_utils import FlexibleArgumentParser  # after the skip

from baton import cli  # after the skip
from baton.engines import arguments, command_line  # after the skip
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
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve", add_help=False))

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
    for module in (arguments, command_line):
        monkeypatch.setattr(module, "serve_parser", ONE_PARSER)


ENGINE = {field.name for field in dataclasses.fields(AsyncEngineArgs)}


@pytest.mark.parametrize("flag", ACTIONS)
def test_every_flag_of_vllm_s_is_honoured_or_refused_in_one_line(flag: str) -> None:
    action = ACTIONS[flag]
    line = line_for(flag, action)
    given = getattr(PARSER.parse_args(list(line)), action.dest)
    try:
        engine = command_line.settings_from_command_line(list(line))
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

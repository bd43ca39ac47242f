"""Read one engine's settings from a command line like `vllm serve`'s: `MODEL --max-model-len 4096 ...`."""

from __future__ import annotations

import dataclasses
import json
from argparse import ArgumentTypeError, Namespace
from typing import Any

from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from baton.config.groups import EngineSettings
from baton.config.settings import reasons
from baton.engines.vllm.arguments import FRONTEND_FLAGS, SERVING_OPTIONS, serve_parser, why_not_honoured
from baton.errors import SettingsError
from baton.models.catalog import EMBEDDED

_ABSENT = object()
"""The default of every flag: a flag that is given with vLLM's own default still counts as given."""

TLS_FLAGS = (
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "enable_ssl_refresh",
    "ssl_cert_reqs",
    "ssl_ciphers",
)
INSTEAD = {
    "api_key": "use `baton keys create`",
    "api_server_count": "Baton is one process for all engines",
    "disable_log_stats": "always on: `/metrics` reads the statistics",
    "enable_prompt_tokens_details": "always on: `usage` holds the cached tokens",
    "enable_request_id_headers": "always on: every answer has `x-request-id`",
    "middleware": "Baton loads no code into its HTTP side; put a proxy before it",
    "root_path": "put a proxy before Baton that strips the prefix",
    "uds": "use `--host` and `--port`",
    "uvicorn_log_level": "use `--log-level`",
} | dict.fromkeys(TLS_FLAGS, "let a proxy before Baton do TLS")
"""What to do in place of a flag that Baton does not have."""


def settings_from_command_line(
    arguments: list[str], *, handoff: bool = False, latent: bool = False
) -> EngineSettings:
    """Read one engine's settings from the arguments of `vllm serve`.

    Args:
        arguments: the model and vLLM's flags, e.g. `["m", "--max-model-len", "4096"]`.
        handoff: the engine's `handoff`.
        latent: the engine's `latent`.

    Raises:
        SettingsError: no model is given, vLLM does not know a flag, or Baton does not offer it.
    """
    changed = _given(arguments)
    model = changed.pop("model_tag", None) or changed.pop("model", None)
    changed.pop("model", None)
    if not model:
        raise SettingsError("no model is given: `baton serve MODEL [vLLM engine flags]`")
    names = changed.pop("served_model_name", None) or [model.rstrip("/").rsplit("/", 1)[-1]]
    memory = changed.pop("kv_cache_memory_bytes", None)
    plugin = changed.pop("io_processor_plugin", None)
    usual = EMBEDDED[model].runner if model in EMBEDDED else "generate" if plugin is None else "pooling"
    runner = changed.pop("runner", usual)
    serving = {key: changed.pop(key) for key in SERVING_OPTIONS if key in changed}
    _refuse_server_flags(changed)
    try:
        return EngineSettings(
            name=names[0],
            aliases=tuple(names[1:]),
            model=model,
            runner=runner,
            kv_cache_memory=memory,
            handoff=handoff,
            latent=latent,
            io_processor=plugin,
            args=changed,
            serving=serving,
        )
    except ValidationError as error:
        raise SettingsError("\n".join(f"baton serve: {reason}" for reason in reasons(error))) from None


def _given(arguments: list[str]) -> dict[str, Any]:
    """Return the values of the flags that were given, by vLLM's names for them."""
    parser = _parser()
    defaults = vars(parser.parse_args([]))
    # A flag that may be repeated adds to a copy of its default, which therefore must be a list or None.
    repeated = {key for key, default in defaults.items() if default == []}
    absent = {key: None if key in repeated else _ABSENT for key in defaults}
    given = vars(parser.parse_args(arguments, Namespace(**absent)))
    return {key: value for key, value in given.items() if value is not absent.get(key)}


def _parser() -> FlexibleArgumentParser:
    parser = serve_parser()
    parser.error = _refuse  # argparse would exit the process
    # vLLM's type would fill in every field, and these would override those of Baton's connector.
    parser.add_argument("--kv-transfer-config", type=_json_object)
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ArgumentTypeError("must be a JSON object")
    return found


def _refuse(message: str) -> None:
    raise SettingsError(f"baton serve: {message}")


def _refuse_server_flags(changed: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for key, value in changed.items():
        flag = f"--{key.replace('_', '-')}"
        if key in INSTEAD:
            raise SettingsError(f"baton serve: {flag} is not offered by Baton: {INSTEAD[key]}")
        if reason := why_not_honoured(key, value):
            raise SettingsError(f"baton serve: {flag} is not offered by Baton: {reason}")
        if key not in known:
            reason = "is not offered by Baton" if key in FRONTEND_FLAGS else "is a flag of vLLM's own server"
            raise SettingsError(f"baton serve: {flag} {reason}")

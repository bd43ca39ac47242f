"""From our settings to vLLM's: engine arguments, and the namespace its serving factories read."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

from pydantic import ValidationError
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs, make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from baton.engines.faults import scrub
from baton.errors import SettingsError
from baton.models.catalog import EMBEDDED
from baton.setting_groups import MIB, EngineSettings
from baton.settings import nearest, reasons
from baton_latent.contract import PLACEHOLDER_KEY, latent_overrides, thinks

CPU_KV_CACHE_BYTES = 512 * MIB
"""So that two engines live on a laptop: 23,000 tokens of SmolLM2's KV."""

OWNED = {
    "model": "the engine's `model`",
    "served_model_name": "the engine's `name`",
    "runner": "the engine's `runner`",
    "kv_cache_memory_bytes": "the engine's `kv_cache_memory`",
    "io_processor_plugin": "the engine's `io_processor`",
    "disable_log_stats": "always on: /metrics reads them",
}
"""Engine arguments that are set elsewhere, and where."""

SERVING_OPTIONS = (
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "enable_force_include_usage",
    "enable_per_request_metrics",
    "exclude_tools_when_tool_choice_none",
    "response_role",
    "return_tokens_as_token_ids",
    "tool_call_parser",
    "tool_strict_level",
)
"""The serving options of vLLM that make sense per engine behind a gateway."""


def engine_args(
    settings: EngineSettings, model: str, transfer: dict[str, Any] | None = None
) -> AsyncEngineArgs:
    """vLLM's arguments for one engine.

    Args:
        settings: the engine's table.
        model: where its weights are, already resolved.
        transfer: vLLM's KV transfer config, where handoffs are on; what `args` say of it stands above it.

    Raises:
        SettingsError: an argument that vLLM does not know, or that is set elsewhere.
    """
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for key in settings.args:
        where = f"engines '{settings.name}': args.{key}"
        if key in OWNED:
            raise SettingsError(f"{where}: set by {OWNED[key]}")
        if key not in known:
            raise SettingsError(f"{where}: unknown to vLLM{nearest(key, known)}")
    args: dict[str, Any] = _platform_defaults() | _model_defaults(settings) | settings.args
    if settings.kv_cache_memory is not None:
        args["kv_cache_memory_bytes"] = int(settings.kv_cache_memory)
    given = args.pop("kv_transfer_config", None)
    if settings.latent:
        args["hf_overrides"] = _latent_overrides(settings, model, args)
    elif thinks(model, _table(args.get("hf_overrides"))):
        raise SettingsError(
            f"engines '{settings.name}': the class of its model takes latent steps: say so with "
            "`latent = true`, which keeps clients' own prompts from asking for them"
        )
    try:
        if transfer is not None or given is not None:
            args["kv_transfer_config"] = KVTransferConfig(**((transfer or {}) | (given or {})))
        if settings.io_processor is not None:
            args["io_processor_plugin"] = settings.io_processor
        return AsyncEngineArgs(model=model, served_model_name=[settings.name], runner=settings.runner, **args)
    except (ValidationError, ValueError, TypeError, OSError) as error:
        reason = scrub(str(error).partition("\n")[0])
        raise SettingsError(f"engines '{settings.name}': args: vLLM refuses them: {reason}") from None


def _table(given: Any) -> dict[str, Any]:
    return given if isinstance(given, dict) else {}


def _latent_overrides(settings: EngineSettings, model: str, args: dict[str, Any]) -> dict[str, Any]:
    """vLLM's `hf_overrides` of an engine that takes latent steps; what `args` say of them stays.

    Raises:
        SettingsError: it cannot take any.
    """
    where = f"engines '{settings.name}': latent"
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        if args.get(key) not in (None, 1):
            raise SettingsError(f"{where}: not supported with {key} above 1")
    given = args.get("hf_overrides") or {}
    if not isinstance(given, dict):
        raise SettingsError(f"{where}: needs `args.hf_overrides` to be a table, if it is given")
    try:
        return given | latent_overrides(model, given.get(PLACEHOLDER_KEY))
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None


def placeholder_of(args: AsyncEngineArgs) -> int:
    """The token id that stands for a latent step of an engine that takes them."""
    overrides = args.hf_overrides
    assert isinstance(overrides, dict)
    return int(overrides[PLACEHOLDER_KEY])


def _model_defaults(settings: EngineSettings) -> dict[str, Any]:
    """What an embedded model needs.

    Raises:
        SettingsError: it is to do what it cannot.
    """
    known = EMBEDDED.get(settings.model)
    if known is None:
        return {}
    if known.runner != settings.runner:
        raise SettingsError(f"engines '{settings.name}': {known.name} needs `runner = \"{known.runner}\"`")
    return dict(known.args)


def _platform_defaults() -> dict[str, Any]:
    # An empty list would mean any: this process fetches nothing for a client (see api/limits.py).
    defaults: dict[str, Any] = {"allowed_media_domains": ["media.invalid"]}
    if current_platform.is_cpu():
        # Compiling takes minutes on a laptop and wants a C++ compiler; eager starts at once.
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
    return defaults


def serving_namespace(settings: EngineSettings) -> Namespace:
    """What vLLM's serving factories read, with vLLM's own defaults.

    Raises:
        SettingsError: a serving option that does not exist, or makes no sense per engine.
    """
    for key in settings.serving:
        if key not in SERVING_OPTIONS:
            hint = nearest(key, list(SERVING_OPTIONS))
            raise SettingsError(f"engines '{settings.name}': serving.{key}: unknown option{hint}")
    namespace: Namespace = _parser().parse_args([])
    values: dict[str, Any] = {
        "model": settings.model,
        "served_model_name": [settings.name],
        "enable_prompt_tokens_details": True,
        **settings.serving,
    }
    for key, value in values.items():
        setattr(namespace, key, value)
    return namespace


_ABSENT = object()
"""The default of every flag, so that one given with vLLM's own default still counts as given."""


def _parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser(prog="baton serve", add_help=False))


def settings_from_command_line(arguments: list[str]) -> EngineSettings:
    """One engine as `vllm serve` users type it: `MODEL --max-model-len 4096 ...`.

    Raises:
        SettingsError: a flag vLLM does not know, or one that Baton does differently.
    """
    parser = _parser()
    parser.error = _refuse  # argparse's own way out is to exit
    parser.set_defaults(**dict.fromkeys(vars(parser.parse_args([])), _ABSENT))
    given = vars(parser.parse_args(arguments))
    changed = {key: value for key, value in given.items() if value is not _ABSENT}
    model = changed.pop("model_tag", None) or changed.pop("model", None)
    changed.pop("model", None)
    if not model:
        raise SettingsError("which model? `baton serve MODEL [vLLM engine flags]`")
    names = changed.pop("served_model_name", None) or [model.rstrip("/").rsplit("/", 1)[-1]]
    memory = changed.pop("kv_cache_memory_bytes", None)
    plugin = changed.pop("io_processor_plugin", None)
    usual = EMBEDDED[model].runner if model in EMBEDDED else "generate" if plugin is None else "pooling"
    runner = changed.pop("runner", usual)
    serving = {key: changed.pop(key) for key in SERVING_OPTIONS if key in changed}
    _refuse_frontend_flags(changed)
    try:
        return EngineSettings(
            name=names[0],
            model=model,
            runner=runner,
            kv_cache_memory=memory,
            io_processor=plugin,
            args=changed,
            serving=serving,
        )
    except ValidationError as error:
        raise SettingsError("\n".join(f"baton serve: {reason}" for reason in reasons(error))) from None


def _refuse(message: str) -> None:
    raise SettingsError(f"baton serve: {message}")


def _refuse_frontend_flags(changed: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    frontend = {field.name for field in dataclasses.fields(BaseFrontendArgs)}
    for key in changed:
        if key not in known:
            flag = f"--{key.replace('_', '-')}"
            reason = "is not offered by Baton" if key in frontend else "is a flag of vLLM's own server"
            hint = ": use `baton keys create`" if key == "api_key" else ""
            raise SettingsError(f"baton serve: {flag} {reason}{hint}")

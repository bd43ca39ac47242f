"""Turn an engine's settings into vLLM's: engine arguments, and the namespace its serving factories read."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from vllm.config import KVTransferConfig, StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from baton.config.groups import CPU_KV_CACHE_BYTES, EngineSettings
from baton.config.settings import nearest
from baton.engines.cpu import read_processor
from baton.engines.dtype import dtype_for
from baton.engines.scrub import WRONG_KIND
from baton.engines.vllm.errors import scrub
from baton.errors import SettingsError
from baton.models.catalog import EMBEDDED
from baton.telemetry.memory import MemoryReader
from baton_latent.contract import PLACEHOLDER_KEY, latent_overrides, thinks

OWNED = {
    "model": "the engine's `model`",
    "served_model_name": "the engine's `name`",
    "runner": "the engine's `runner`",
    "kv_cache_memory_bytes": "the engine's `kv_cache_memory`",
    "io_processor_plugin": "the engine's `io_processor`",
    "disable_log_stats": "always on: /metrics reads them",
}
"""Engine arguments that are set elsewhere, and where."""

NOT_HONOURED = {
    "aggregate_engine_logging": "Baton logs no periodic statistics; read `/metrics`",
    "allowed_local_media_path": "Baton reads no local files for clients; send images as `data:` URLs",
    "allowed_media_domains": "Baton fetches images itself; set `images.allowed_hosts`",
    "data_parallel_multi_port_external_lb": "Baton serves all engines on one port",
    "enable_log_requests": "Baton writes one line for each request, without its texts",
    "shutdown_timeout": "Baton lets running requests finish itself; set `drain_timeout_s`",
    "tokens_only": "Baton offers the routes with text; `/v1/completions` takes token ids too",
}
"""Engine arguments that only vLLM's own server acts on, and what to use instead."""

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

REASONING_OPTIONS = ("reasoning_parser", "reasoning_parser_plugin")
"""Engine arguments that may be given as serving options too: vLLM's serving handlers act on them."""


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
    _check_names(settings)
    args: dict[str, Any] = _platform_defaults() | _model_defaults(settings) | settings.args
    args |= _reasoning_options(settings)
    if settings.kv_cache_memory is not None:
        args["kv_cache_memory_bytes"] = int(settings.kv_cache_memory)
    if dtype := processor_s_dtype(settings, model):
        args["dtype"] = dtype
    given = args.pop("kv_transfer_config", None)
    if given is not None and not isinstance(given, dict):
        raise SettingsError(f"engines '{settings.name}': args.kv_transfer_config: must be a table")
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
        if isinstance(structured := args.get("structured_outputs_config"), dict):
            args["structured_outputs_config"] = StructuredOutputsConfig(**structured)
        if settings.io_processor is not None:
            args["io_processor_plugin"] = settings.io_processor
        built = AsyncEngineArgs(
            model=model, served_model_name=[settings.name], runner=settings.runner, **args
        )
    except (ValidationError, ValueError, TypeError, OSError) as error:
        reason = scrub(str(error).partition("\n")[0])
        if reason == WRONG_KIND:  # worded for clients
            reason = "one of them has a value of the wrong kind"
        raise SettingsError(f"engines '{settings.name}': args: vLLM refuses them: {reason}") from None
    _check_parsers(settings, built)
    return built


def _check_names(settings: EngineSettings) -> None:
    """Refuse arguments that are set elsewhere, that Baton cannot honour, or that vLLM does not know.

    Raises:
        SettingsError: there is one.
    """
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for key, value in settings.args.items():
        where = f"engines '{settings.name}': args.{key}"
        if key in OWNED:
            raise SettingsError(f"{where}: set by {OWNED[key]}")
        if reason := why_not_honoured(key, value):
            raise SettingsError(f"{where}: not supported: {reason}")
        if key not in known:
            raise SettingsError(f"{where}: unknown to vLLM{nearest(key, known)}")


def why_not_honoured(key: str, value: object) -> str | None:
    """Say why Baton cannot do what an engine argument asks; None: it can, or nothing is asked."""
    return NOT_HONOURED.get(key) if value != getattr(AsyncEngineArgs, key, None) else None


def processor_s_dtype(settings: EngineSettings, model: str) -> str | None:
    """Choose the dtype by what the processor can; None: vLLM decides, as always where a GPU computes."""
    if not current_platform.is_cpu():
        return None
    return dtype_for(settings, Path(model), read_processor(), memory=MemoryReader().total())


def _reasoning_options(settings: EngineSettings) -> dict[str, Any]:
    """Return the reasoning options given under `serving`, where `tool_call_parser` is given too.

    Raises:
        SettingsError: `args` give another value.
    """
    given = {key: settings.serving[key] for key in REASONING_OPTIONS if key in settings.serving}
    for key, value in given.items():
        if settings.args.get(key, value) != value:
            raise SettingsError(f"engines '{settings.name}': args.{key} and serving.{key} differ: give one")
    return given


def _check_parsers(settings: EngineSettings, args: AsyncEngineArgs) -> None:
    """Refuse a parser that vLLM does not have, as vLLM's own server does at its start.

    Raises:
        SettingsError: the reasoning parser or the tool call parser is unknown, or the latter is missing.
    """
    where = f"engines '{settings.name}'"
    reasoning = args.create_structured_outputs_config()
    if reasoning.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(reasoning.reasoning_parser_plugin)
    known = ReasoningParserManager.list_registered()
    if reasoning.reasoning_parser and reasoning.reasoning_parser not in known:
        hint = nearest(reasoning.reasoning_parser, known)
        raise SettingsError(f"{where}: reasoning_parser: vLLM has no '{reasoning.reasoning_parser}'{hint}")
    tools = settings.serving.get("tool_call_parser")
    known = ToolParserManager.list_registered()
    if tools is not None and tools not in known:
        hint = nearest(str(tools), known)
        raise SettingsError(f"{where}: serving.tool_call_parser: vLLM has no '{tools}'{hint}")
    if settings.serving.get("enable_auto_tool_choice") and tools is None:
        raise SettingsError(f"{where}: serving.enable_auto_tool_choice: give a `tool_call_parser` too")


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
        if key not in (*SERVING_OPTIONS, *REASONING_OPTIONS):
            hint = nearest(key, [*SERVING_OPTIONS, *REASONING_OPTIONS])
            raise SettingsError(f"engines '{settings.name}': serving.{key}: unknown option{hint}")
    namespace: Namespace = serve_parser().parse_args([])
    values: dict[str, Any] = {
        "model": settings.model,
        "served_model_name": [settings.name, *settings.aliases],
        "enable_prompt_tokens_details": True,
        **settings.serving,
    }
    for key, value in values.items():
        setattr(namespace, key, value)
    return namespace


def serve_parser() -> FlexibleArgumentParser:
    """Build vLLM's parser of `vllm serve`."""
    parser = FlexibleArgumentParser(prog="baton serve", add_help=False, conflict_handler="resolve")
    return make_arg_parser(parser)

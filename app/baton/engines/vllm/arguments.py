"""Write an engine's settings as vLLM's arguments; `flags.py` reads them from a command line."""

from __future__ import annotations

import contextlib
import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from vllm.config import KVTransferConfig, LoRAConfig, StructuredOutputsConfig
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from baton.config.groups import CPU_KV_CACHE_BYTES, EngineSettings
from baton.config.settings import nearest
from baton.engines.adapters import Adapter
from baton.engines.hardware import dtype_for, read_processor
from baton.engines.scrub import WRONG_KIND, scrub
from baton.engines.vllm.lora import spare_slots
from baton.errors import SettingsError
from baton.models.catalog import EMBEDDED
from baton.models.parsers import REASONING_PARSER, TOOL_PARSER, parsers_of, serving_of
from baton.telemetry.memory import MemoryReader
from baton_latent.contract import PLACEHOLDER_KEY, latent_overrides, thinks

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, propagate_flash_late_interaction
except ImportError:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import (  # type: ignore[import-not-found]  # types are of the lock's vLLM
        make_arg_parser,
        propagate_flash_late_interaction,
    )


MOVES_EXTENSION = "baton_kv.extension.BatonWorker"
"""The extension of vLLM's worker that lets the connector move KV."""

OWNED = {
    "model": "the engine's `model`",
    "served_model_name": "the engine's `name`",
    "runner": "the engine's `runner`",
    "kv_cache_memory_bytes": "the engine's `kv_cache_memory`",
    "io_processor_plugin": "the engine's `io_processor`",
    "disable_log_stats": "always on: /metrics reads them",
}
"""Engine arguments that are set elsewhere in the settings, and where."""

NO_SLEEP = "Baton has no route that puts an engine to sleep; stop the gateway instead"
RANKS_STAY = "Baton does not change an engine's ranks while it runs; add gateways instead"
SUPERVISED = "Baton restarts engines itself; see `[supervision]`"
LOGS = "Baton writes the logs of its engines too; set `log_level` and `log_format`"
NOT_HONOURED = {
    "aggregate_engine_logging": "Baton logs no periodic statistics; read `/metrics`",
    "allowed_local_media_path": "Baton reads no local files for clients; send images as `data:` URLs",
    "allowed_media_domains": "Baton fetches images itself; set `images.allowed_hosts`",
    "data_parallel_backend": "Baton starts no engine through Ray; scale by replicas of the gateway instead, "
    "`serve run baton.ray:app replicas=N`",
    "default_mm_loras": "an adapter answers where `model` names it; set the engine's `adapters`",
    "data_parallel_multi_port_external_lb": "Baton serves all engines on one port",
    "elastic_ep_max_dp_size": RANKS_STAY,
    "enable_elastic_ep": RANKS_STAY,
    "enable_fault_tolerance": SUPERVISED,
    "enable_log_requests": "Baton writes one line for each request, without its texts",
    "enable_nccl_comm_suspend": NO_SLEEP,
    "enable_sleep_mode": NO_SLEEP,
    "fault_tolerance_config": SUPERVISED,
    "log_config_file": LOGS,
    "log_level": LOGS,
    "logging_config": LOGS,
    "profiler_config": "Baton has no route that starts a profile; `/metrics` says where time goes",
    "scheduling_policy": "Baton drops clients' `priority` and serves tenants in turns; see `[admission]`",
    "shutdown_timeout": "Baton lets running requests finish itself; set `drain_timeout_s`",
    "sleep_mode_backend": NO_SLEEP,
    "sleep_mode_offload_cudagraph": NO_SLEEP,
    "sleep_preserve_parameter_names": NO_SLEEP,
    "tokens_only": "Baton offers the routes with text; `/v1/completions` takes token ids too",
    "weight_transfer_config": "Baton has no route that takes weights; start the gateway anew with them",
}
"""Engine arguments that only vLLM's own server acts on, that nothing here reaches, or whose processes Baton
cannot supervise, and what to use instead."""

RAY_EXECUTOR = (
    'Baton starts no engine\'s workers through Ray: leave it unset, or set "mp"; on more machines scale by '
    "replicas of the gateway, `serve run baton.ray:app replicas=N`"
)
"""Why Ray's `distributed_executor_backend` is refused: no gateway could end its workers."""

MORE_ADAPTERS = 4
"""LoRA adapters that an engine may hold beside those of its settings, unless these say otherwise."""
RANKS: tuple[int, ...] = get_args(MaxLoRARanks)
DEFAULT_RANK = LoRAConfig.max_lora_rank

SERVING_OPTIONS = (
    "anthropic_disabled_thinking_effort",
    "chat_template",
    "chat_template_content_format",
    "cohere_format",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "enable_flash_late_interaction",
    "enable_force_include_usage",
    "enable_per_request_metrics",
    "exclude_tools_when_tool_choice_none",
    "fingerprint_mode",
    "fingerprint_value",
    "reasoning_effort_map",
    "response_role",
    "return_tokens_as_token_ids",
    "tool_call_parser",
    "tool_parser_plugin",
    "tool_strict_level",
)
"""The serving options of vLLM that an engine's `serving` table may hold, where the installed one has them."""

REASONING_OPTIONS = ("reasoning_parser", "reasoning_parser_plugin")
"""Engine arguments that `serving` may hold too, because vLLM's serving handlers act on them."""


def engine_args(
    settings: EngineSettings,
    model: str,
    transfer: dict[str, Any] | None = None,
    *,
    gpu_share: float | None = None,
    own_process: bool = True,
    adapters: Sequence[Adapter] = (),
) -> AsyncEngineArgs:
    """Build vLLM's arguments for one engine.

    Args:
        transfer: vLLM's KV transfer config, where handoffs are on; `args` may override its keys.
        gpu_share: share of its GPUs' memory, see `gpu_shares`; None: vLLM's default. Not read on a CPU.
        own_process: whether the model of a CPU engine of one rank runs in a process beside the core's, as
            vLLM has it there; else in the core's, as on a GPU.
        adapters: the LoRA adapters that it begins with.

    Raises:
        SettingsError: an argument is unknown to vLLM, is set elsewhere, is not supported, or vLLM refuses its
            value.
    """
    _check_names(settings)
    args: dict[str, Any] = _platform_defaults(settings, gpu_share) | _model_defaults(settings) | settings.args
    if current_platform.is_cpu() and not own_process:
        # The class: vLLM's CPU platform replaces the string "uni", as a spawned core's OpenMP is not bound.
        args.setdefault("distributed_executor_backend", UniProcExecutor)
    args |= _reasoning_options(settings, model) | _adapter_args(settings, adapters)
    if settings.kv_cache_memory is not None:
        args["kv_cache_memory_bytes"] = int(settings.kv_cache_memory)
    if dtype := processor_dtype(settings, model):
        args["dtype"] = dtype
    given = args.pop("kv_transfer_config", None)
    if given is not None and not isinstance(given, dict):
        raise SettingsError(f"engines '{settings.name}': args.kv_transfer_config: must be a table")
    if transfer is not None or given is not None:
        extra = "kv_connector_extra_config"  # merged, so that one key of it can be set
        both = _table((transfer or {}).get(extra)) | _table((given or {}).get(extra))
        args["kv_transfer_config"] = (transfer or {}) | (given or {}) | ({extra: both} if both else {})
    if transfer is not None:
        args.setdefault("worker_extension_cls", MOVES_EXTENSION)
    if settings.latent:
        args["hf_overrides"] = _latent_overrides(settings, model, args)
    elif thinks(model, _table(args.get("hf_overrides"))):
        raise SettingsError(
            f"engines '{settings.name}': its model takes latent steps: set `latent = true`, which keeps "
            "clients' own prompts from asking for them"
        )
    built = _build(settings, model, args)
    propagate_flash_late_interaction(Namespace(**settings.serving), built)
    _check_parsers(settings, model, built)
    return built


def _build(settings: EngineSettings, model: str, args: dict[str, Any]) -> AsyncEngineArgs:
    """Give `args` to vLLM, their tables as vLLM's types.

    Raises:
        SettingsError: vLLM refuses a value.
    """
    try:
        if "kv_transfer_config" in args:
            args["kv_transfer_config"] = KVTransferConfig(**args["kv_transfer_config"])
        if isinstance(structured := args.get("structured_outputs_config"), dict):
            args["structured_outputs_config"] = StructuredOutputsConfig(**structured)
        if settings.io_processor is not None:
            args["io_processor_plugin"] = settings.io_processor
        return AsyncEngineArgs(model=model, served_model_name=[settings.name], runner=settings.runner, **args)
    except (ValidationError, ValueError, TypeError, OSError) as error:
        reason = scrub(str(error).partition("\n")[0])
        if reason == WRONG_KIND:  # that text is for clients
            reason = "one of them has a value of the wrong type"
        raise SettingsError(f"engines '{settings.name}': args: vLLM refuses them: {reason}") from None


def _adapter_args(settings: EngineSettings, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Return the arguments of an engine that takes LoRA adapters; none for one that takes none.

    Raises:
        SettingsError: there are more adapters than `args.max_loras` allows.
    """
    args = settings.args
    if not settings.adapters and not args.get("enable_lora"):
        return {}
    most = args.get("max_loras") or len(settings.adapters) + MORE_ADAPTERS
    if len(settings.adapters) > most:
        raise SettingsError(
            f"engines '{settings.name}': args.max_loras: {most}, and there are {len(settings.adapters)} "
            "`adapters`"
        )
    slots = most + spare_slots()
    rank = max([DEFAULT_RANK, *(each.rank for each in adapters)])
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": max(slots, args.get("max_cpu_loras") or 0),
        "max_lora_rank": args.get("max_lora_rank")
        or min((each for each in RANKS if each >= rank), default=rank),
    }


def _check_names(settings: EngineSettings) -> None:
    """Check the names of an engine's arguments.

    Raises:
        SettingsError: an argument is set elsewhere, cannot be honoured by Baton, or is unknown to vLLM.
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
    """Explain why Baton cannot honour an engine argument; None: it can, or the value is vLLM's default."""
    if key == "distributed_executor_backend":
        return RAY_EXECUTOR if "ray" in str(value).lower() else None
    return NOT_HONOURED.get(key) if value != getattr(AsyncEngineArgs, key, None) else None


def processor_dtype(settings: EngineSettings, model: str) -> str | None:
    """Choose the dtype by the processor's instructions; None: vLLM decides, as always on a GPU."""
    if not current_platform.is_cpu():
        return None
    return dtype_for(settings, Path(model), read_processor(), memory=MemoryReader().total())


def _reasoning_options(settings: EngineSettings, model: str) -> dict[str, Any]:
    """Return the reasoning options: those under `serving`, as `tool_call_parser` stands there, or the choice.

    Raises:
        SettingsError: `args` and `serving` give different values.
    """
    given = {key: settings.serving[key] for key in REASONING_OPTIONS if key in settings.serving}
    for key, value in given.items():
        if settings.args.get(key, value) != value:
            raise SettingsError(
                f"engines '{settings.name}': args.{key} and serving.{key} differ: set one of them"
            )
    return given | {REASONING_PARSER: parsers_of(settings, model).thoughts.name or ""}


def _check_parsers(settings: EngineSettings, model: str, args: AsyncEngineArgs) -> None:
    """Check an engine's parsers, as vLLM's own server does at its start.

    Raises:
        SettingsError: vLLM has no such reasoning parser or tool call parser, or `enable_auto_tool_choice` is
            set and there is no `tool_call_parser`.
    """
    where = f"engines '{settings.name}'"
    reasoning = args.create_structured_outputs_config()
    if reasoning.reasoning_parser_plugin:
        _require_plugin(f"{where}: reasoning_parser_plugin", reasoning.reasoning_parser_plugin)
        ReasoningParserManager.import_reasoning_parser(reasoning.reasoning_parser_plugin)
    known = ReasoningParserManager.list_registered()
    if reasoning.reasoning_parser and reasoning.reasoning_parser not in known:
        hint = nearest(reasoning.reasoning_parser, known)
        raise SettingsError(f"{where}: reasoning_parser: vLLM has no '{reasoning.reasoning_parser}'{hint}")
    if plugin := settings.serving.get("tool_parser_plugin"):
        _require_plugin(f"{where}: serving.tool_parser_plugin", plugin)
        ToolParserManager.import_tool_parser(plugin)
    tools = parsers_of(settings, model).calls
    known = ToolParserManager.list_registered()
    if tools.name is not None and tools.name not in known:
        hint = nearest(tools.name, known)
        raise SettingsError(f"{where}: serving.tool_call_parser: vLLM has no '{tools.name}'{hint}")
    if settings.serving.get("enable_auto_tool_choice") and tools.name is None:
        raise SettingsError(
            f"{where}: serving.enable_auto_tool_choice: set `tool_call_parser` too: {tools.why}"
        )


def _require_plugin(where: str, plugin: str) -> None:
    """Refuse a plugin that vLLM would not find, and would log no more than an error about.

    Raises:
        SettingsError: it is neither a file nor a module.
    """
    with contextlib.suppress(ImportError, ValueError):
        if Path(plugin).is_file() or find_spec(plugin) is not None:
            return
    raise SettingsError(f"{where}: there is no file or module {plugin}")


def _table(given: Any) -> dict[str, Any]:
    return given if isinstance(given, dict) else {}


def _latent_overrides(settings: EngineSettings, model: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's `hf_overrides` for an engine with `latent`; those that `args` hold are kept.

    Raises:
        SettingsError: the engine is split over several devices, `hf_overrides` is no table, or the model
            cannot take latent steps.
    """
    where = f"engines '{settings.name}': latent"
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        if args.get(key) not in (None, 1):
            raise SettingsError(f"{where}: not supported with {key} above 1")
    given = args.get("hf_overrides") or {}
    if not isinstance(given, dict):
        raise SettingsError(f"{where}: `args.hf_overrides` must be a table")
    try:
        return given | latent_overrides(model, given.get(PLACEHOLDER_KEY))
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None


def placeholder_of(args: AsyncEngineArgs) -> int:
    """Return the token id that stands for a latent step, from the arguments of an engine with `latent`."""
    overrides = args.hf_overrides
    assert isinstance(overrides, dict)
    return int(overrides[PLACEHOLDER_KEY])


def rosetta_pairs(args: AsyncEngineArgs, name: str) -> frozenset[tuple[str, str]]:
    """Return source and target of the pairs that AVP's settings name in the connector's."""
    config = args.kv_transfer_config
    extra = config.kv_connector_extra_config if config is not None else {}
    source, target = extra.get("avp_source_model"), extra.get("avp_target_model")
    pairs = [(source, name)] if source else []
    return frozenset([*pairs, *([(name, target)] if target else [])])


def _model_defaults(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments that an embedded model needs; none for other models.

    Raises:
        SettingsError: the settings name a `runner` that the embedded model does not support.
    """
    known = EMBEDDED.get(settings.model)
    if known is None:
        return {}
    if known.runner != settings.runner:
        raise SettingsError(f"engines '{settings.name}': {known.name} needs `runner = \"{known.runner}\"`")
    return dict(known.args)


def _platform_defaults(settings: EngineSettings, gpu_share: float | None) -> dict[str, Any]:
    """Return the arguments that the platform decides; `args` overrides them.

    Raises:
        SettingsError: `gpu_share` is set and there is no GPU.
    """
    # vLLM must fetch nothing for a client: Baton does, in baton.images. An empty list would allow any domain.
    defaults: dict[str, Any] = {"allowed_media_domains": ["media.invalid"]}
    if current_platform.is_cpu():
        # Compiling takes minutes on a laptop and wants a C++ compiler; eager starts at once.
        defaults["enforce_eager"] = True
        if "gpu_memory_utilization" not in settings.args:  # which vLLM heeds on a CPU too, without a size
            defaults["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
        if settings.gpu_share is not None:
            raise SettingsError(
                f"engines '{settings.name}': gpu_share: the installed vLLM runs on CPUs: "
                "set `kv_cache_memory`"
            )
    elif gpu_share is not None:
        defaults["gpu_memory_utilization"] = gpu_share
    return defaults


def serving_namespace(settings: EngineSettings, model: str | None = None) -> Namespace:
    """Build the namespace that vLLM's serving factories read, with vLLM's own defaults.

    Args:
        model: path of its weights; None: the settings' `model` is one.

    Raises:
        SettingsError: a serving option is unknown, or cannot be set for a single engine.
    """
    namespace: Namespace = serve_parser().parse_args([])
    known = [key for key in (*SERVING_OPTIONS, *REASONING_OPTIONS) if hasattr(namespace, key)]
    for key in settings.serving:
        if key not in known:
            raise SettingsError(
                f"engines '{settings.name}': serving.{key}: unknown option{nearest(key, known)}"
            )
    parsers = parsers_of(settings, model or settings.model)
    values: dict[str, Any] = {
        "model": settings.model,
        "served_model_name": list(settings.names),
        "enable_prompt_tokens_details": True,
        "enable_auto_tool_choice": parsers.calls.name is not None,
        **serving_of(settings),
        TOOL_PARSER: parsers.calls.name,
        REASONING_PARSER: parsers.thoughts.name or "",
    }
    for key, value in values.items():
        setattr(namespace, key, value)
    return namespace


def serve_parser() -> FlexibleArgumentParser:
    """Build vLLM's parser of `vllm serve`."""
    parser = FlexibleArgumentParser(prog="baton serve", add_help=False, conflict_handler="resolve")
    return make_arg_parser(parser)

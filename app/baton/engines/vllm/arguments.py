"""Write an engine's settings as vLLM's arguments, and read a `vllm serve` command line as settings."""

from __future__ import annotations

import dataclasses
import json
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
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
from baton.config.settings import nearest, reasons
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
    from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs, make_arg_parser
except ImportError:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import (  # type: ignore[import-not-found]  # types are of the lock's vLLM
        BaseFrontendArgs,
        make_arg_parser,
    )


FRONTEND_FLAGS = frozenset(field.name for field in dataclasses.fields(BaseFrontendArgs))
"""What vLLM's own server is told beside its engine's arguments."""

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

NOT_HONOURED = {
    "aggregate_engine_logging": "Baton logs no periodic statistics; read `/metrics`",
    "allowed_local_media_path": "Baton reads no local files for clients; send images as `data:` URLs",
    "allowed_media_domains": "Baton fetches images itself; set `images.allowed_hosts`",
    "data_parallel_backend": "Baton starts no engine through Ray; scale by replicas of the gateway instead, "
    "`serve run baton.ray:app replicas=N`",
    "default_mm_loras": "an adapter answers where `model` names it; set the engine's `adapters`",
    "data_parallel_multi_port_external_lb": "Baton serves all engines on one port",
    "enable_log_requests": "Baton writes one line for each request, without its texts",
    "shutdown_timeout": "Baton lets running requests finish itself; set `drain_timeout_s`",
    "tokens_only": "Baton offers the routes with text; `/v1/completions` takes token ids too",
}
"""Engine arguments that only vLLM's own server acts on, or whose processes Baton cannot supervise, and what
to use instead."""

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
"""The serving options of vLLM that an engine's `serving` table may hold."""

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
        ReasoningParserManager.import_reasoning_parser(reasoning.reasoning_parser_plugin)
    known = ReasoningParserManager.list_registered()
    if reasoning.reasoning_parser and reasoning.reasoning_parser not in known:
        hint = nearest(reasoning.reasoning_parser, known)
        raise SettingsError(f"{where}: reasoning_parser: vLLM has no '{reasoning.reasoning_parser}'{hint}")
    tools = parsers_of(settings, model).calls
    known = ToolParserManager.list_registered()
    if tools.name is not None and tools.name not in known:
        hint = nearest(tools.name, known)
        raise SettingsError(f"{where}: serving.tool_call_parser: vLLM has no '{tools.name}'{hint}")
    if settings.serving.get("enable_auto_tool_choice") and tools.name is None:
        raise SettingsError(
            f"{where}: serving.enable_auto_tool_choice: set `tool_call_parser` too: {tools.why}"
        )


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
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
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
    for key in settings.serving:
        if key not in (*SERVING_OPTIONS, *REASONING_OPTIONS):
            hint = nearest(key, [*SERVING_OPTIONS, *REASONING_OPTIONS])
            raise SettingsError(f"engines '{settings.name}': serving.{key}: unknown option{hint}")
    namespace: Namespace = serve_parser().parse_args([])
    parsers = parsers_of(settings, model or settings.model)
    values: dict[str, Any] = {
        "model": settings.model,
        "served_model_name": [settings.name, *settings.aliases],
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


# Read one engine's settings from a command line like `vllm serve`'s: `MODEL --max-model-len 4096 ...`.


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
    adapters = _adapters(changed.pop("lora_modules", None) or [], names)
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
            adapters=adapters,
            args=changed,
            serving=serving,
        )
    except ValidationError as error:
        raise SettingsError("\n".join(f"baton serve: {reason}" for reason in reasons(error))) from None


def _adapters(modules: list[Any], names: Sequence[str]) -> dict[str, str]:
    """Return the engine's `adapters`, of what `--lora-modules` names.

    Raises:
        SettingsError: an adapter is named twice, is of another model, or has a form that Baton does not load.
    """
    found: dict[str, str] = {}
    for each in modules:
        where = f"baton serve: --lora-modules: '{each.name}'"
        if each.name in found:
            raise SettingsError(f"{where} is named twice")
        if each.base_model_name is not None and each.base_model_name not in names:
            raise SettingsError(f"{where} is of the model '{each.base_model_name}', which is not served")
        if each.is_3d_lora_weight:
            raise SettingsError(f"{where}: Baton loads no adapters with `is_3d_lora_weight`")
        found[each.name] = each.path
    return found


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

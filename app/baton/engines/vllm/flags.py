"""Read a command line like `vllm serve`'s as settings: `MODEL --max-model-len 4096 ...`.

What becomes of each of vLLM's flags stands here: it is an argument or an option of the engine, a setting of
the gateway (`GATEWAY`), or is refused in a line that says what to do instead (`INSTEAD`, and `NOT_HONOURED`
of `arguments.py` for what may stand in `args` too). Seam tests hold the tables against the installed vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from baton.config.groups import EngineSettings
from baton.config.settings import reasons
from baton.engines.vllm.arguments import (
    NOT_HONOURED,
    OWNED,
    SERVING_OPTIONS,
    serve_parser,
    why_not_honoured,
)
from baton.errors import SettingsError
from baton.models.catalog import EMBEDDED

ENGINE_ARGS = frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs))

GATEWAY = {
    "allow_credentials": "edge.allow_credentials",
    "allowed_headers": "edge.allowed_headers",
    "allowed_media_domains": "images.allowed_hosts",
    "allowed_methods": "edge.allowed_methods",
    "allowed_origins": "edge.allowed_origins",
    "host": "host",
    "uvicorn_log_level": "log_level",
    "log_level": "log_level",  # after uvicorn's, which it overrides
    "port": "port",
    "root_path": "root_path",
    "shutdown_timeout": "drain_timeout_s",
    "sse_keep_alive_interval": "edge.keep_alive_s",
    "ssl_ca_certs": "tls.ca_file",
    "ssl_cert_reqs": "tls.client_certs",
    "ssl_certfile": "tls.cert_file",
    "ssl_ciphers": "tls.ciphers",
    "ssl_keyfile": "tls.key_file",
    "uds": "uds",
}
"""Flags that set a setting of the gateway."""
VALUES: dict[str, dict[Any, str]] = {
    "ssl_cert_reqs": {0: "none", 1: "optional", 2: "required"},
    "uvicorn_log_level": {"critical": "error", "trace": "debug"},
    "log_level": {
        "DEBUG": "debug",
        "INFO": "info",
        "WARNING": "warning",
        "ERROR": "error",
        "CRITICAL": "error",
    },
}
"""What their values are called there, where they are called otherwise."""

NO_TEXTS = "Baton logs no texts of requests and answers"
PROBED = "Baton watches its engines itself; see `[supervision]`, `/readyz` has their health"
INSTEAD = {
    "api_key": "use `baton keys create`, which stores a digest alone",
    "api_server_count": "one process serves all engines; for more start several gateways",
    "cohere_is_reasoning_model": "Baton has no route of Cohere's",
    "data_parallel_supervisor_port": PROBED,
    "disable_access_log_for_endpoints": "Baton logs no probes, and one line for each other request",
    "disable_fastapi_docs": "`/docs` needs a key as all routes do, where there are keys",
    "disable_log_stats": "always on: `/metrics` reads the statistics",
    "disable_uvicorn_access_log": 'set `log_level = "warning"`, which leaves out the line of each request',
    "dp_supervisor_probe_failure_threshold": PROBED,
    "dp_supervisor_probe_interval_s": PROBED,
    "dp_supervisor_probe_timeout_s": PROBED,
    "enable_log_deltas": NO_TEXTS,
    "enable_log_outputs": NO_TEXTS,
    "enable_offline_docs": "always on: `/docs` loads nothing from other hosts",
    "enable_prompt_tokens_details": "always on: `usage` holds the cached tokens",
    "enable_request_id_headers": "always on: every answer has `x-request-id`",
    "enable_scale_out": "Baton has no routes for parts of a request; scale by several gateways",
    "enable_server_load_tracking": "`/metrics` has the load: `baton_queue_running`",
    "enable_ssl_refresh": "always on: certificates are read again when they change",
    "enable_tokenizer_info_endpoint": "clients see no tokenizer files; `/tokenize` and `/detokenize` answer",
    "grpc": "Baton speaks HTTP alone",
    "grpc_port": "Baton speaks HTTP alone",
    "h11_max_header_count": "a request may have 128 headers",
    "h11_max_incomplete_event_size": "a request's head may have 64 KiB; set `limits.body_bytes` for its body",
    "headless": "an engine's processes are on one machine; start a gateway on each, over one shared store",
    "log_error_stack": 'set `log_level = "debug"`, which shows the texts of exceptions',
    "max_log_len": NO_TEXTS,
    "middleware": "Baton loads no code into its HTTP side; put a proxy before it",
    "tool_server": "Baton runs nobody's tools; the client runs them",
    "trust_request_chat_template": "clients' templates are not run; set `--chat-template`",
    "trust_request_mm_kwargs": "clients' values are dropped; set `--mm-processor-kwargs`",
}
"""Flags that act on nothing here, and what to do instead."""
AS_IT_IS = {
    "api_server_count": 1,
    "enable_offline_docs": True,
    "enable_prompt_tokens_details": True,
    "enable_request_id_headers": True,
    "enable_ssl_refresh": True,
    "h11_max_header_count": 128,
    "h11_max_incomplete_event_size": 64 * 1024,
}
"""Values of these flags that ask for what is so anyway; of the others it is vLLM's default."""

REMOVED = {
    "collect-model-execute-time": "use `--collect-detailed-traces model`",
    "collect-model-forward-time": "use `--collect-detailed-traces model`",
    "cuda-graph-sizes": "use `--cudagraph-capture-sizes`",
    "device": "the installed vLLM build decides; for some of the GPUs use `--device-ids`",
    "disable-async-output-proc": "leave it out",
    "disable-frontend-multiprocessing": "leave it out",
    "disable-log-requests": "leave it out: requests are logged without their texts",
    "disable-mm-preprocessor-cache": "use `--mm-processor-cache-gb 0`",
    "enable-lora-bias": "leave it out",
    "enable-multimodal-encoder-data-parallel": "use `--mm-encoder-tp-mode data`",
    "enable-prompt-adapter": "prompt adapters are gone; use LoRA",
    "enable-reasoning": "leave it out: `--reasoning-parser` alone does it",
    "engine-use-ray": "leave it out",
    "eplb-log-balancedness": "use `--eplb-config.log_balancedness`",
    "eplb-step-interval": "use `--eplb-config.step_interval`",
    "eplb-window-size": "use `--eplb-config.window_size`",
    "guided-decoding-backend": "use `--structured-outputs-config.backend`",
    "guided-decoding-disable-additional-properties": "use `--structured-outputs-config`",
    "guided-decoding-disable-any-whitespace": "use `--structured-outputs-config.disable_any_whitespace`",
    "guided-decoding-disable-fallback": "use `--structured-outputs-config`",
    "logits-processor-pattern": "use `--logits-processors`",
    "long-lora-scaling-factors": "leave it out",
    "lora-extra-vocab-size": "leave it out",
    "max-long-partial-prefills": "use `--long-prefill-token-threshold`",
    "max-num-partial-prefills": "use `--long-prefill-token-threshold`",
    "max-prompt-adapter-token": "prompt adapters are gone; use LoRA",
    "max-prompt-adapters": "prompt adapters are gone; use LoRA",
    "max-seq-len-to-capture": "use `--max-cudagraph-capture-size`",
    "multi-step-stream-outputs": "leave it out",
    "ngram-prompt-lookup-max": "use `--speculative-config.prompt_lookup_max`",
    "ngram-prompt-lookup-min": "use `--speculative-config.prompt_lookup_min`",
    "num-lookahead-slots": "use `--spec-tokens`",
    "num-redundant-experts": "use `--eplb-config.num_redundant_experts`",
    "num-scheduler-steps": "leave it out",
    "num-speculative-tokens": "use `--spec-tokens`",
    "override-neuron-config": "use `--additional-config`",
    "override-pooler-config": "use `--pooler-config`",
    "preemption-mode": "leave it out: what is preempted is computed again",
    "prompt-adapters": "prompt adapters are gone; use LoRA",
    "qlora-adapter-name-or-path": "use LoRA",
    "quantization-param-path": "leave it out: scales come with the weights",
    "rope-scaling": "use `--hf-overrides`",
    "rope-theta": "use `--hf-overrides`",
    "scheduler-delay-factor": "leave it out",
    "speculative-model": "use `--spec-model`",
    "swap-space": "use `--kv-offloading-size`",
    "task": "use `--runner` and `--convert`",
    "tokenizer-pool-size": "use `--renderer-num-workers`",
    "tokenizer-pool-type": "leave it out",
    "use-v2-block-manager": "leave it out",
    "worker-use-ray": "leave it out: Baton starts no workers through Ray",
}
"""Flags that earlier versions of vLLM had, and what there is now. Some begin as a flag of today's does, for
which argparse would take them."""

LOGPROBS = "max_logprobs"
_ABSENT = object()
"""The default of every flag: a flag that is given with vLLM's own default still counts as given."""


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """A command line that was read.

    Attributes:
        engine: the engine that it describes.
        gateway: settings of the gateway, group by group, for `load_settings`.
        flags: the flag that gave each of them, by the setting's name.
    """

    engine: EngineSettings
    gateway: dict[str, Any]
    flags: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Fate:
    """The fate of a flag.

    Attributes:
        kind: it `acts`, what it asks for is `so` anyway, or it is `refused`.
        text: the setting that it sets, or the reason.
    """

    kind: Literal["acts", "so", "refused"]
    text: str


def fate_of(dest: str) -> Fate | None:
    """Find the fate of a flag, by vLLM's name for its value; None: nobody has decided it."""
    if dest in GATEWAY:
        return Fate("acts", f"`{GATEWAY[dest]}`")
    if dest == "config":
        return Fate("acts", "a YAML file of vLLM's flags, or `baton.toml`")
    if dest in INSTEAD:
        return Fate("so" if AS_IT_IS.get(dest) is True else "refused", INSTEAD[dest])
    if dest in NOT_HONOURED:
        return Fate("refused", NOT_HONOURED[dest])
    if dest == "served_model_name":
        return Fate("acts", "`engines.name`, and further names `engines.aliases`")
    if dest == "lora_modules":
        return Fate("acts", "`engines.adapters`")
    if dest == "model_tag":
        return Fate("acts", "`engines.model`")
    if dest in OWNED:
        return Fate("acts", f"`engines.{OWNED[dest].split('`')[-2]}`")
    if dest in SERVING_OPTIONS:
        return Fate("acts", f"`engines.serving.{dest}`")
    more = {"distributed_executor_backend": ", but not Ray", LOGPROBS: " and `limits.logprobs`"}.get(dest, "")
    return Fate("acts", f"`engines.args.{dest}`{more}") if dest in ENGINE_ARGS else None


def read_command_line(
    arguments: Sequence[str],
    *,
    file: Path | None = None,
    own: Collection[str] = (),
    handoff: bool = False,
    latent: bool = False,
) -> CommandLine:
    """Read the arguments of `vllm serve`.

    Args:
        arguments: the model and vLLM's flags, e.g. `["m", "--max-model-len", "4096"]`.
        file: a YAML file of flags that `read_flags` has taken; those of `arguments` override it.
        own: flags that the caller reads itself, to be suggested for those that vLLM does not know.

    Raises:
        SettingsError: no model is given, vLLM does not know a flag, or Baton does not offer it.
    """
    parser = _parser()
    words = [] if file is None else parser.load_config_file(str(file))
    place = partial(_place, file, [*words])
    known = [flag for flag in (*parser._option_string_actions, *own) if flag.startswith("--")]
    parser.error = partial(_refuse, place, known)  # argparse would exit the process
    model_first = bool(arguments) and not arguments[0].startswith("-")
    line = [*arguments[:model_first], *words, *arguments[model_first:]]
    _refuse_removed(parser, place, line)
    try:
        given, defaults = _given(parser, line)
    except (ValueError, IndexError) as error:  # of vLLM's own reading of `--a.b.c VALUE`
        raise SettingsError(f"baton serve: {str(error) or 'a flag lacks its value'}") from None
    engine: dict[str, Any] = {}
    gateway: dict[str, Any] = {}
    flags: dict[str, str] = {}
    for dest, value in given.items():
        flag = f"--{dest.replace('_', '-')}"
        if dest in GATEWAY:
            flags[GATEWAY[dest]] = place(flag)
        elif dest in INSTEAD:
            if value != AS_IT_IS.get(dest, defaults.get(dest)):
                raise SettingsError(f"{place(flag)} is not offered by Baton: {INSTEAD[dest]}")
        elif reason := why_not_honoured(dest, value):
            raise SettingsError(f"{place(flag)} is not offered by Baton: {reason}")
        elif dest != "model_tag" and fate_of(dest) is None:
            raise SettingsError(f"{place(flag)} is not offered by Baton, which does not know it yet")
        else:
            engine[dest] = value
    for dest, setting in GATEWAY.items():
        if dest in given:
            named = VALUES.get(dest)
            _set(gateway, setting, named.get(given[dest], given[dest]) if named else given[dest])
    if engine.get(LOGPROBS, 0) > 0:  # else the gateway's own limit would stand before it
        flags["limits.logprobs"] = place("--max-logprobs")
        _set(gateway, "limits.logprobs", engine[LOGPROBS])
    if not (engine.get("model_tag") or engine.get("model")):
        raise SettingsError(_no_model(flags))
    return CommandLine(_engine(engine, handoff=handoff, latent=latent), gateway, flags)


def _engine(changed: dict[str, Any], *, handoff: bool, latent: bool) -> EngineSettings:
    """Build the engine's settings from the flags that were given, by vLLM's names for them."""
    tag, named = changed.pop("model_tag", None), changed.pop("model", None)
    model = tag or named
    names = changed.pop("served_model_name", None) or [model.rstrip("/").rsplit("/", 1)[-1]]
    memory = changed.pop("kv_cache_memory_bytes", None)
    plugin = changed.pop("io_processor_plugin", None)
    usual = EMBEDDED[model].runner if model in EMBEDDED else "generate" if plugin is None else "pooling"
    runner = changed.pop("runner", usual)
    serving = {key: changed.pop(key) for key in SERVING_OPTIONS if key in changed}
    adapters = _adapters(changed.pop("lora_modules", None) or [], names)
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


def _no_model(flags: Mapping[str, str]) -> str:
    told = "baton serve: no model is given: `baton serve MODEL [vLLM engine flags]`"
    if not flags:
        return told
    setting, place = next(iter(flags.items()))
    return f"{told}; for the settings' engines write `{setting}` there, not {place.split(': ')[-1]} here"


def _set(settings: dict[str, Any], name: str, value: Any) -> None:
    """Put a value under `GROUP.KEY` or `KEY`."""
    group, dot, key = name.rpartition(".")
    (settings.setdefault(group, {}) if dot else settings)[key] = value


def told_by_flag(message: str, flags: Mapping[str, str]) -> str:
    """Write an error of the settings with the flags that gave them, line by line."""
    lines = []
    for line in message.splitlines():
        setting, colon, rest = line.partition(": ")
        named = next((name for name in flags if f"{setting}.".startswith(f"{name}.")), None)
        lines.append(f"{flags[named]}: {rest}" if colon and named else line)
    return "\n".join(lines)


def _given(parser: FlexibleArgumentParser, line: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the flags that were given, by vLLM's names for them, and vLLM's defaults."""
    defaults = vars(parser.parse_args([]))
    # A flag that may be repeated adds to a copy of its default, which therefore must be a list or None.
    repeated = {key for key, default in defaults.items() if default == []}
    absent = {key: None if key in repeated else _ABSENT for key in defaults}
    given = vars(parser.parse_args(line, argparse.Namespace(**absent)))
    return {key: value for key, value in given.items() if value is not absent.get(key)}, defaults


def _parser() -> FlexibleArgumentParser:
    parser = serve_parser()
    # vLLM's type would fill in every field, and these would override those of Baton's connector.
    parser.add_argument("--kv-transfer-config", type=_json_object)
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return found


def _place(file: Path | None, words: Sequence[str], flag: str) -> str:
    """Return where a flag stands: on the command line, or in the file."""
    inside = any(word.replace("_", "-").partition("=")[0] == flag for word in words if word.startswith("--"))
    return f"{file}: {flag.removeprefix('--')}" if inside else f"baton serve: {flag}"


def _refuse_removed(parser: FlexibleArgumentParser, place: partial[str], line: Sequence[str]) -> None:
    """Refuse flags of earlier versions, which argparse might take for the beginning of another one."""
    for word in line:
        name = word.partition("=")[0].partition(".")[0].removeprefix("--").replace("_", "-")
        flag = f"--{name}"
        if word.startswith("--") and name in REMOVED and flag not in parser._option_string_actions:
            raise SettingsError(f"{place(flag)}: vLLM has removed it: {REMOVED[name]}")


def _refuse(place: partial[str], known: Sequence[str], message: str) -> NoReturn:
    """Raise argparse's error, with the nearest flag where one is unknown."""
    what, _, unknown = message.partition("unrecognized arguments: ")
    if what or not unknown:
        flag = message.removeprefix("argument ").partition(":")[0].split("/")[0]
        inside = place(flag).partition(": ")[0] if flag.startswith("--") else "baton serve"
        raise SettingsError(f"{inside}: {_in_one_line(message)}")
    words = unknown.split()
    unknown_flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not unknown_flags:
        raise SettingsError(
            f"baton serve: {words[0]}: neither a flag nor its value; a command line serves one model, the "
            "settings several"
        )
    near = difflib.get_close_matches(unknown_flags[0], known, n=1, cutoff=0.7)
    hint = f"did you mean '{near[0]}'?" if near else "`baton serve --help=WORD` finds flags"
    raise SettingsError(f"{place(unknown_flags[0])}: there is no such flag; {hint}")


def _in_one_line(message: str) -> str:
    """Write argparse's error, which may hold one of pydantic's, without what is for programmers alone."""
    lines = [re.sub(r" \[type=.*", "", line).strip() for line in message.splitlines()]
    told = ": ".join(line for line in lines if line and not line.startswith("For further information"))
    return told.replace("invalid loads value", "not JSON")


SEARCH = "`--help=GROUP` shows the flags of a group, `--help=WORD` finds some, `--help=all` shows all."


def help_text(word: str) -> str:
    """Write vLLM's help of its flags, each with what becomes of it here.

    Args:
        word: a group, a part of a flag's name, or `all`; empty or `listgroup`: the groups.
    """
    parser = _parser()
    parser.usage = "baton serve [MODEL] [FLAGS]"
    for action in parser._actions:
        fate = fate_of(action.dest)
        if fate is not None and action.help is not argparse.SUPPRESS:
            told = {"acts": "Sets ", "so": "In Baton ", "refused": "Refused: "}[fate.kind] + fate.text
            action.help = f"{action.help or ''}\n\n{told.replace('%', '%%')}.".strip()
    parser._search_keyword = None if word in ("", "listgroup") else word
    text = parser.format_help()
    return f"{text}\n{SEARCH}\n" if parser._search_keyword is None else f"{text}"

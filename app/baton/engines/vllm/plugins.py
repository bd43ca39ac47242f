"""Create and close an engine's IO processor plugin, and run its prompts."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, aclosing, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

import structlog
import vllm.inputs
import vllm.plugins.io_processors.interface as interface
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.pooling.pooling.protocol import (
    IOProcessorRequest,
    IOProcessorResponse,
    PoolingRequest,
    PoolingResponse,
)
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel, UsageInfo
from vllm.plugins import IO_PROCESSOR_PLUGINS_GROUP
from vllm.plugins.io_processors.interface import IOProcessor
from vllm.pooling_params import PoolingParams
from vllm.tokenizers import get_tokenizer
from vllm.utils.counter import Counter
from vllm.utils.import_utils import resolve_obj_by_qualname

from baton.admission.fair_threads import in_own_thread
from baton.engines.backend import Json
from baton.engines.engine import Plugin
from baton.engines.installed_plugins import InstalledPlugin, installed_plugins
from baton.engines.vllm.client import salted
from baton.engines.vllm.errors import from_validation
from baton.errors import GenerationFailed, StartError
from baton.telemetry.ids import RequestContext

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


# Supply the import names and the base class that IO processor plugins for vLLM 0.11 to 0.15 need.
#
# They exist only while the plugin of an engine with `classic_plugin = true` is imported.


_PROTOCOL = {
    "IOProcessorRequest": IOProcessorRequest,
    "IOProcessorResponse": IOProcessorResponse,
    "OpenAIBaseModel": OpenAIBaseModel,
    "PoolingRequest": PoolingRequest,
    "PoolingResponse": PoolingResponse,
    "UsageInfo": UsageInfo,
}
_INPUTS = ("PromptType", "TextPrompt", "TokensPrompt", "EmbedsPrompt", "DataPrompt", "SingletonPrompt")
MOVED: dict[str, dict[str, Any]] = {
    "vllm.entrypoints.openai.protocol": _PROTOCOL,
    "vllm.entrypoints.openai.engine.protocol": _PROTOCOL,
    "vllm.inputs.data": {name: getattr(vllm.inputs, name) for name in _INPUTS},
    "vllm.multimodal.inputs": {"MultiModalDataDict": vllm.inputs.MultiModalDataDict},
    "vllm.transformers_utils.tokenizer": {"get_tokenizer": get_tokenizer},
    "vllm.utils": {"Counter": Counter, "resolve_obj_by_qualname": resolve_obj_by_qualname},
}
"""The names of each module that existed there in vLLM 0.11 to 0.15, as the same objects of today's vLLM."""


class ClassicIOProcessor(IOProcessor):
    """The base class as it was: its constructor takes only the configuration."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def validate_or_generate_params(self, params: Any = None) -> Any:
        return params or PoolingParams()


@contextlib.contextmanager
def classic_names() -> Iterator[None]:
    """Supply the names while the context lasts; modules that exist keep the names they have."""
    added: list[tuple[ModuleType, str]] = []
    new_modules: list[str] = []
    base, interface.IOProcessor = interface.IOProcessor, ClassicIOProcessor
    try:
        for path, names in MOVED.items():
            module = sys.modules.get(path)
            if module is None:
                module = sys.modules[path] = ModuleType(path)
                new_modules.append(path)
            for name, value in names.items():
                if not hasattr(module, name):
                    setattr(module, name, value)
                    added.append((module, name))
        yield
    finally:
        interface.IOProcessor = base
        for module, name in added:
            delattr(module, name)
        for path in new_modules:
            del sys.modules[path]


PLUGIN_TASK = "plugin"
RENAMED_HOOKS = {"exhibit": "describe", "for_exhibit": "for_description"}
_REQUEST: TypeAdapter[Any] = TypeAdapter(IOProcessorRequest[Any])


def chosen_plugin(vllm_config: Any) -> str | None:
    """Return the name of an engine's plugin, if any: its argument, else what the model's config.json says."""
    model = vllm_config.model_config
    named = model.io_processor_plugin or model.hf_config.to_dict().get("io_processor_plugin")
    return str(named) if named else None


def make_plugin(name: str, vllm_config: Any, renderer: Any, *, classic: bool) -> Plugin:
    """Make the instance of the plugin `name`.

    Args:
        renderer: the engine's renderer; plugins written for older vLLM do not take it.
        classic: supply the import names of vLLM 0.11 to 0.15 while the plugin is imported.

    Raises:
        StartError: the plugin is not installed, VLLM_PLUGINS leaves it out, or its import or its constructor
            fails. The message lists what is installed.
    """
    found = {
        plugin.name: plugin for plugin in installed_plugins() if plugin.group == IO_PROCESSOR_PLUGINS_GROUP
    }
    plugin = found.get(name)
    if plugin is None or not plugin.allowed:
        raise StartError(_missing(name, plugin, sorted(found)))
    names: AbstractContextManager[object] = classic_names() if classic else nullcontext()
    try:
        with names:
            instance = _instance(plugin.load(), vllm_config, renderer)
    except StartError as error:
        raise StartError(f"The IO processor plugin '{name}' ({plugin.value}) {error.message}") from None
    except Exception as error:  # the border to the plugin
        hint = "" if classic else _classic_hint(error)
        raise StartError(
            f"The IO processor plugin '{name}' ({plugin.value}) fails: {error!s:.300}{hint}"
        ) from error
    return Plugin(name, instance, _request)


def _instance(entry_point: Callable[[], str], vllm_config: Any, renderer: Any) -> Any:
    cls = resolve_obj_by_qualname(entry_point())
    _refuse_renamed_hooks(cls)
    try:
        inspect.signature(cls).bind(vllm_config, renderer)
    except TypeError:
        instance = cls(vllm_config)
    else:
        instance = cls(vllm_config, renderer)
    _refuse_renamed_hooks(type(instance))  # an entry point may name a factory
    return instance


def _refuse_renamed_hooks(cls: Any) -> None:
    for old, new in RENAMED_HOOKS.items():
        if hasattr(cls, old):
            raise StartError(f"defines the hook '{old}', which is called '{new}' now: rename the method.")


def _missing(name: str, plugin: InstalledPlugin | None, found: list[str]) -> str:
    if plugin is not None:
        return f"The IO processor plugin '{name}' is installed, but VLLM_PLUGINS leaves it out: add it there."
    listed = ", ".join(found) or "none"
    return f"The IO processor plugin '{name}' is not installed. Installed are: {listed}."


def _classic_hint(error: Exception) -> str:
    if isinstance(error, ImportError | AttributeError | TypeError):
        return ". If it was written for vLLM 0.11 to 0.15, set the engine's `classic_plugin = true`."
    return ""


def _request(body: Json) -> Any:
    try:
        return _REQUEST.validate_python(body)
    except ValidationError as error:
        raise from_validation(error) from None


async def close_plugin(plugin: Plugin) -> None:
    """Call the instance's `close`, where it has one; an error in it is only logged."""
    close = getattr(plugin.instance, "close", None)
    if close is None:
        return
    try:
        await in_own_thread(close)
    except Exception as error:  # noqa: BLE001  # the border to the plugin; its engine ends anyway
        structlog.get_logger("baton.engine").error("plugin_close_failed", plugin=plugin.name, exc_info=error)


def plugin_params(params: Any) -> PoolingParams:
    """Return a copy of a plugin's `PoolingParams` with its task filled in, as vLLM's own server does."""
    params = PoolingParams() if params is None else params.clone()
    if params.task is None:
        params.task = PLUGIN_TASK
    return params


async def encode_prompt(
    client: AsyncLLM,
    parsed: Any,
    params: PoolingParams,
    context: RequestContext,
    *,
    salt: str | None,
    number: int,
    priority: int,
) -> Any:
    """Run one prompt of a plugin through the engine.

    Args:
        parsed: the prompt, parsed by vLLM's `parse_model_prompt`.
        priority: lower is sooner.

    Returns:
        vLLM's `PoolingRequestOutput`.

    Raises:
        GenerationFailed: the engine reported an error, or ended without a result.
    """
    (rendered,) = await client.renderer.render_cmpl_async([parsed])
    headers = None
    if await client.is_tracing_enabled():
        given = {"traceparent": context.traceparent, "tracestate": context.tracestate}
        headers = {name: value for name, value in given.items() if value}
    outputs = client.encode(
        salted(rendered, salt),
        params,
        f"{context.request_id}-{number}",
        priority=priority,
        trace_headers=headers,
    )
    async with aclosing(outputs):  # when this is cancelled, the engine drops the request
        async for output in outputs:
            if output.error is not None:
                raise GenerationFailed()
            if output.finished:
                return output
    raise GenerationFailed()

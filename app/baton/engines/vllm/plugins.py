"""vLLM's plugins: which are installed, and the one instance of an engine's IO processor."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError
from vllm import PoolingParams
from vllm.entrypoints.pooling.pooling.protocol import IOProcessorRequest
from vllm.plugins import IO_PROCESSOR_PLUGINS_GROUP
from vllm.utils.import_utils import resolve_obj_by_qualname

from baton.engines.installed_plugins import InstalledPlugin, installed_plugins
from baton.engines.port import Json, Plugin
from baton.engines.vllm.classic_plugins import classic_names
from baton.engines.vllm.errors import from_validation
from baton.errors import StartError

PLUGIN_TASK = "plugin"
RENAMED_HOOKS = {"exhibit": "describe", "for_exhibit": "for_description"}
_REQUEST: TypeAdapter[Any] = TypeAdapter(IOProcessorRequest[Any])


def chosen_plugin(vllm_config: Any) -> str | None:
    """An engine's plugin, chosen as by vLLM: its argument, else what its model's config.json says."""
    model = vllm_config.model_config
    named = model.io_processor_plugin or model.hf_config.to_dict().get("io_processor_plugin")
    return str(named) if named else None


def make_plugin(name: str, vllm_config: Any, renderer: Any, *, classic: bool) -> Plugin:
    """The instance of the plugin `name`.

    Args:
        name: as its entry point is called.
        vllm_config: of the engine.
        renderer: of the engine; plugins of older vLLM get none.
        classic: give the plugin the names of vLLM 0.11 to 0.15 while it is imported.

    Raises:
        StartError: it is not installed, is kept out by VLLM_PLUGINS, or fails; with what is installed.
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
        return cls(vllm_config)
    return cls(vllm_config, renderer)


def _refuse_renamed_hooks(cls: type[Any]) -> None:
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
    """Let go of what the instance holds, where it has a `close` of its own."""
    close = getattr(plugin.instance, "close", None)
    if close is None:
        return
    try:
        await asyncio.to_thread(close)
    except Exception as error:  # noqa: BLE001  # the border to the plugin; its engine ends anyway
        structlog.get_logger("baton.engine").error("plugin_close_failed", plugin=plugin.name, exc_info=error)


def plugin_params(params: Any) -> PoolingParams:
    """What goes to the engine with a plugin's prompt; vLLM's own server does the same."""
    params = PoolingParams() if params is None else params.clone()
    if params.task is None:
        params.task = PLUGIN_TASK
    return params

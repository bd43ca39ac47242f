"""Serve vLLM's two routes by which operators load and unload LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from baton.admission.fair_threads import in_own_thread
from baton.config.groups import EngineName
from baton.engines.adapters import AdapterInvalid, KeptAdapter, KeptAdapters, read_adapter
from baton.errors import InternalError, InvalidRequest, OperationUnsupported
from baton.http.request import gateway_of, read_json, require_operator, state_of
from baton.relay.asked import parse_options

router = APIRouter()
AbsolutePath = Annotated[str, Field(pattern=r"^[/~]", max_length=4096)]


class LoadAdapter(BaseModel):
    """The body of `POST /v1/load_lora_adapter`: vLLM's, and which engine is meant."""

    model_config = ConfigDict(extra="forbid", title="BatonLoadAdapter", strict=True)

    lora_name: EngineName = Field(description="The model name under which it is served.")
    lora_path: AbsolutePath = Field(
        description="Its folder on the gateway's machine, with `adapter_config.json` and "
        "`adapter_model.safetensors`."
    )
    load_inplace: bool = Field(False, description="Whether it takes the place of an adapter of this name.")
    is_3d_lora_weight: bool = Field(False, description="Must be false: no such adapter is loaded.")
    model: str | None = Field(None, description="Name of its engine; needed where several generate.")


class UnloadAdapter(BaseModel):
    """The body of `POST /v1/unload_lora_adapter`."""

    model_config = ConfigDict(extra="forbid", title="BatonUnloadAdapter", strict=True)

    lora_name: str = Field(max_length=128, description="Its name.")
    lora_int_id: int | None = Field(None, description="Not read: the name says which.")


@router.post("/v1/load_lora_adapter", response_class=Response)
async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter from a folder of the gateway's machine; an operator's key is needed.

    It is served under its name at once, and again after a restart.
    """
    require_operator(request, "adapter.load")
    gateway = gateway_of(request)
    wanted = parse_options(LoadAdapter, await read_json(request, gateway.settings.limits))
    state_of(request.scope).what = wanted.lora_name
    if wanted.is_3d_lora_weight:
        raise OperationUnsupported("'is_3d_lora_weight': adapters of this form are not loaded.")
    _require_not_of_the_settings(request, wanted.lora_name)
    try:
        adapter = await in_own_thread(read_adapter, wanted.lora_name, Path(wanted.lora_path))
    except AdapterInvalid as error:
        raise InvalidRequest(f"'lora_path': {error}.", param="lora_path") from None
    engine = await gateway.fleet.load_adapter(adapter, wanted.model, replace=wanted.load_inplace)
    entry = KeptAdapter(engine=engine, name=adapter.name, path=adapter.path)
    await _keep(request, lambda kept: kept.add(entry))
    return Response(f"Success: LoRA adapter '{adapter.name}' added successfully.", media_type="text/plain")


@router.post("/v1/unload_lora_adapter", response_class=Response)
async def unload_lora_adapter(request: Request) -> Response:
    """Unload a LoRA adapter; an operator's key is needed. Requests under way go on with it."""
    require_operator(request, "adapter.unload")
    gateway = gateway_of(request)
    name = parse_options(UnloadAdapter, await read_json(request, gateway.settings.limits)).lora_name
    state_of(request.scope).what = name
    _require_not_of_the_settings(request, name)
    engine = await gateway.fleet.unload_adapter(name)
    await _keep(request, lambda kept: kept.remove(engine, name))
    return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")


async def _keep(request: Request, change: Callable[[KeptAdapters], None]) -> None:
    """Change the file of the adapters that are there after a restart.

    Raises:
        InternalError: it cannot be written; what the request changed holds until then.
    """
    try:
        await in_own_thread(change, KeptAdapters(gateway_of(request).settings.kept_adapters))
    except AdapterInvalid as error:
        raise InternalError(f"This is done, but not after a restart of the gateway: {error}.") from None


def _require_not_of_the_settings(request: Request, name: str) -> None:
    """Refuse to change an adapter that the settings name, and that would be back after a restart."""
    if any(name in engine.adapters for engine in gateway_of(request).settings.engines):
        raise InvalidRequest(
            f"'lora_name': the settings name '{name}' (setting engines.adapters): change it there.",
            param="lora_name",
        )

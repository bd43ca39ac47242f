"""Define the settings file's groups: one class a TOML table, with a description for every key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, model_validator

from baton.config.frozen import KIB, MIB, Frozen
from baton.config.handoff_groups import AutomaticMode, HandoffSettings
from baton.config.remote_groups import RemoteSettings, ServerUrl
from baton.config.request_groups import ImageSettings, LimitSettings, ResponseSettings

__all__ = [
    "CPU_KV_CACHE_BYTES", "MIB", "AdmissionSettings", "AuthSettings", "AutomaticMode", "EdgeSettings",
    "EngineSettings", "Frozen", "HandoffSettings", "ImageSettings", "LimitSettings", "MetricsSettings",
    "PoolingSettings", "RemoteSettings", "ResponseSettings", "SupervisionSettings",
]  # fmt: skip

CPU_KV_CACHE_BYTES = 512 * MIB
"""KV pool of an engine on a CPU whose settings name none, so that two engines fit on a laptop."""

EngineName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]


HostName = Annotated[
    str,
    Field(
        pattern=r"^((\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*)$", max_length=255
    ),
]


OF_OUR_OWN_ENGINES = (
    "kv_cache_memory", "gpu_share", "auto", "translate", "latent", "io_processor", "classic_plugin", "args",
    "serving",
)  # fmt: skip
"""Settings of an engine that runs here, which say nothing of another server."""


class EngineSettings(Frozen):
    """One `[[engines]]` table: one vLLM engine, or another server."""

    name: EngineName = Field(description="The word by which a request's `model` picks this engine.")
    aliases: tuple[EngineName, ...] = Field(
        (),
        description="Further words for it in `model`; `/v1/models` lists them too. Names and "
        "aliases are unique over all engines.",
    )
    model: str = Field(
        min_length=1,
        description="Where the weights are: an embedded model, a local folder, or a hub id. With `url`: the "
        "model's name there, which is `name` unless set.",
    )
    url: ServerUrl | None = Field(
        None,
        description="Address of another server that answers this engine's requests: another Baton, `vllm "
        "serve`, or any with OpenAI's API. Unset: vLLM runs here.",
    )
    remote: RemoteSettings = Field(
        RemoteSettings(), description="How that server is asked; only with `url`. See below."
    )
    runner: Literal["generate", "pooling"] = Field(
        "generate",
        description="What the engine does: `generate` for text, `pooling` for embedding, ranking "
        "and geospatial models.",
    )
    kv_cache_memory: ByteSize | None = Field(
        None,
        ge=16 * MIB,
        description="Size of the KV pool. Unset: 512 MiB on a CPU, vLLM's own choice on a GPU. "
        "On a GPU that several engines share, set `gpu_share` instead.",
    )
    gpu_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of its GPUs' memory that the engine may take, with weights and KV pool. "
        "Unset: engines on the same GPU share 0.92 of it equally; one alone takes vLLM's default.",
    )
    handoff: bool = Field(
        False,
        description="Whether requests may leave their KV behind as a handoff, and start from one. With "
        "`url`: where the server is a Baton over the same store.",
    )
    auto: AutomaticMode | None = Field(
        None,
        description="Whether handoffs of this engine are automatic. Unset: as `handoffs.auto` says.",
    )
    translate: bool = Field(
        False,
        description="Whether requests may continue handoffs of other weights without asking for it: their "
        "text is written by this engine's template and computed once. Needs `handoff`.",
    )
    latent: bool = Field(
        False,
        description="Whether handoffs may ask for latent steps. Needs `handoff`, and a Qwen2, "
        "Llama, Mistral or Gemma model in a local folder.",
    )
    io_processor: str | None = Field(
        None,
        min_length=1,
        description="IO processor plugin of a pooling engine. Unset: the one that the model's "
        "config.json names.",
    )
    classic_plugin: bool = Field(
        False,
        description="Whether the plugin was written for vLLM 0.11 to 0.15: it is given what it "
        "imports from there.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Any of vLLM's `AsyncEngineArgs`, by its Python name."
    )
    serving: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's serving options by their Python name: `chat_template`, "
        "`tool_call_parser`, `enable_auto_tool_choice`, `reasoning_parser`, ... Both parsers are `auto` "
        "unless set: chosen by the model's files, see [Parsers](parsers.md); `off` and a name win.",
    )

    @model_validator(mode="before")
    @classmethod
    def _there_it_has_the_same_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("url") is not None and "model" not in given:
            return given | {"model": given.get("name")}
        return given

    @model_validator(mode="after")
    def _settings_are_of_its_kind(self) -> EngineSettings:
        if self.url is None and self._given("remote"):
            raise ValueError(f"engines '{self.name}': `remote` says how a server is asked: give its `url`")
        given = [name for name in OF_OUR_OWN_ENGINES if self._given(name)]
        if self.url is not None and given:
            raise ValueError(
                f"engines '{self.name}': `{given[0]}` is for engines that run here: leave it out, or `url`"
            )
        return self

    def _given(self, name: str) -> bool:
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return bool(getattr(self, name) != default)

    @property
    def own(self) -> bool:
        """Whether the engine runs here, and is no other server."""
        return self.url is None

    @property
    def ranks(self) -> int:
        """Number of processes over which `args` split the model."""
        split = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        return math.prod(int(self.args.get(name) or 1) for name in split)

    @property
    def forkable(self) -> bool:
        """Whether the fork server may start the engine: with ranks, vLLM binds each one's threads itself."""
        return self.own and self.ranks == 1 and "distributed_executor_backend" not in self.args


class AuthSettings(Frozen):
    """`[auth]`: who may call."""

    keys_file: Path | None = Field(
        None,
        description="File of hashed API keys, made by `baton keys create`. Unset: "
        "`~/.config/baton/keys.json`, used when it exists.",
    )
    allow_unauthenticated: bool = Field(
        False, description="Serve a non-loopback address without keys. Set it only if you mean it."
    )


class SupervisionSettings(Frozen):
    """`[supervision]`: how engines start, and what happens to one that dies or hangs."""

    fork_server: bool = Field(
        True,
        description="Whether engines of one rank are forked from a process that has imported vLLM, which "
        "takes a fifth of the time. `false`: each starts a new interpreter (`spawn`).",
    )
    hang_s: float = Field(
        60.0,
        ge=0,
        description="Seconds an engine with work may make no progress; then it is ended and "
        "started again. Never less than four times its longest step so far; 0: never.",
    )
    restarts: int = Field(
        5,
        ge=0,
        description="Restarts of one engine within `window_s`; above it the engine stays down, as `failed`.",
    )
    window_s: float = Field(600.0, gt=0, description="Seconds within which restarts are counted.")
    backoff_s: float = Field(
        1.0, ge=0, description="Seconds before the second restart in a row, doubled for each one after it."
    )
    backoff_max_s: float = Field(60.0, ge=0, description="Longest wait before a restart, in seconds.")


class EdgeSettings(Frozen):
    """`[edge]`: what a client may make the gateway wait for, and how many may be connected."""

    header_s: float = Field(
        10.0, gt=0, le=3600, description="Seconds a request's head may take to arrive; then 408."
    )
    body_s: float = Field(
        30.0, gt=0, le=3600, description="Seconds the gateway waits for a request's body; then 408."
    )
    body_bytes_per_s: ByteSize = Field(
        ByteSize(64 * KIB),
        ge=1,
        description="A body that comes at least so fast may take longer than `body_s`.",
    )
    send_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Seconds a client may leave unread what does not fit the buffers; then it is cut off.",
    )
    keep_alive_s: float = Field(
        15.0,
        ge=0,
        le=3600,
        description="Seconds without an event of a stream before each comment (`: keep-alive`), so "
        "that proxies go on waiting (nginx waits 60 s, Cloudflare 100 s). 0: none.",
    )
    connections: int = Field(
        10_000,
        ge=1,
        description="Open connections, as far as the system's limit of open files allows; above it: 503.",
    )
    allowed_hosts: tuple[HostName, ...] = Field(
        (),
        description="Hosts the gateway is known as, besides `localhost` and loopback addresses: "
        "`example.org`, `*.example.org`, an IP address, each without a port. Empty: "
        "any; but on loopback without keys no other.",
    )


class AdmissionSettings(Frozen):
    """`[admission]`: how much is let in at once, and how what must wait is served."""

    tenant_requests: int = Field(
        0, ge=0, description="Requests of one tenant at once; above it: 429. 0: no limit."
    )
    tenant_rate: float = Field(
        0.0, ge=0, description="Requests one tenant may make a minute; above it: 429. 0: no limit."
    )
    tenant_burst: int | None = Field(
        None,
        ge=1,
        description="Of these, how many at once after a pause. Unset: those of ten seconds.",
    )
    engine_requests: int = Field(
        256,
        ge=1,
        description="Requests of one tenant that an engine is given at once; more wait, each "
        "tenant in turn. One place for every eight comes on top for other tenants.",
    )
    engine_waiting: int = Field(
        1024, ge=0, description="Requests that may wait for one engine; above it: 503."
    )
    wait_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Seconds a request waits for its turn at an engine, for its images to be read "
        "or its body to be parsed; then 503.",
    )
    memory_reserve: ByteSize = Field(
        ByteSize(256 * MIB),
        ge=0,
        description="Memory that is kept free: below it new work gets 503. 0: never.",
    )


class MetricsSettings(Frozen):
    """`[metrics]`: where `/metrics` answers when the gateway has keys, or is not on loopback."""

    host: str = Field("127.0.0.1", description="Address of the separate metrics port.")
    port: int = Field(
        8001,
        ge=0,
        le=65535,
        description="The separate metrics port, which asks for no key; 0 picks a free one.",
    )


class PoolingSettings(Frozen):
    """`[pooling]`: what IO processor plugins may take, per engine."""

    requests: int = Field(
        8,
        ge=1,
        description="Requests of one tenant that an IO processor plugin works on at once; more "
        "wait. One place for every eight comes on top for other tenants.",
    )
    waiting: int = Field(64, ge=0, description="Requests that may wait for the plugin; above it: 503.")
    wait_s: float = Field(
        300.0, gt=0, le=3600, description="Seconds a request waits for the plugin; then 503."
    )
    prompts: int = Field(
        16,
        ge=1,
        le=1024,
        description="Prompts of one request in the engine at once; some wait there while others "
        "are computed.",
    )
    threads: int = Field(16, ge=1, le=256, description="Threads for what a plugin does synchronously.")
    time_limit_s: float = Field(
        900.0, gt=0, description="Seconds a request through a plugin may take; then 504."
    )
    upload_bytes: ByteSize = Field(
        ByteSize(2048 * MIB), ge=1024, description="Largest file sent as the body itself; above it: 413."
    )
    uploads_bytes: ByteSize | None = Field(
        None,
        ge=2048,
        description="Most bytes of the uploaded files of all requests under way together; above "
        "it: 503, and above a tenant's share of it: 429. Unset: eight times "
        "`upload_bytes`.",
    )
    spool_dir: Path | None = Field(
        None,
        description="Where uploaded files wait for the plugin: a folder of this user or of root, "
        "no link. Unset: the system's folder for temporary files. A start removes what "
        "a killed gateway left there.",
    )

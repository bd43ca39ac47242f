"""The groups of the settings file: one class a table, every key with what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field

KIB = 1024
MIB = 1024 * KIB
CPU_KV_CACHE_BYTES = 512 * MIB
"""KV pool of an engine on a CPU whose settings name none, so that two engines fit on a laptop."""

EngineName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]


HostName = Annotated[
    str,
    Field(
        pattern=r"^((\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*)$", max_length=255
    ),
]


class Frozen(BaseModel):
    """A group of settings: read-only, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineSettings(Frozen):
    """One `[[engines]]` table: one vLLM engine."""

    name: EngineName = Field(description="The word a request's `model` picks this engine by.")
    aliases: tuple[EngineName, ...] = Field(
        (), description="Further words for it in `model`; `/v1/models` lists them too."
    )
    model: str = Field(
        min_length=1,
        description="Where the weights are: an embedded model, a local folder, or a hub id.",
    )
    runner: Literal["generate", "pooling"] = Field(
        "generate", description="What the engine does: text generation, or pooling (embeddings)."
    )
    kv_cache_memory: ByteSize | None = Field(
        None,
        ge=16 * MIB,
        description="KV pool of this engine; unset: 512 MiB on CPU, vLLM's own choice on a GPU.",
    )
    handoff: bool = Field(
        False, description="Requests may leave their KV behind for others, and start from it."
    )
    latent: bool = Field(
        False, description="Handoffs may ask for latent steps: the model thinks on before it is handed over."
    )
    io_processor: str | None = Field(
        None,
        min_length=1,
        description="IO processor plugin of a pooling engine; unset: the one its model's config.json names.",
    )
    classic_plugin: bool = Field(
        False,
        description="The plugin was written for vLLM 0.11 to 0.15: give it what it imports from there.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Any of vLLM's AsyncEngineArgs, by its Python name."
    )
    serving: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's serving options by their Python name: chat_template, tool_call_parser, "
        "reasoning_parser, ...",
    )


class AuthSettings(Frozen):
    """`[auth]`: who may call."""

    keys_file: Path | None = Field(
        None,
        description="File of hashed API keys, made by `baton keys create`; unset: "
        "keys.json in the configuration folder, used when it exists.",
    )
    allow_unauthenticated: bool = Field(
        False, description="Serve a non-loopback address without keys. Say so only if you mean it."
    )


class LimitSettings(Frozen):
    """`[limits]`: what a request may weigh before it is read."""

    body_bytes: ByteSize = Field(
        ByteSize(32 * MIB), ge=1024, description="Largest request body; above it: 413."
    )
    bodies_bytes: ByteSize | None = Field(
        None,
        ge=2048,
        description="Most bytes of the bodies of all requests under way together; above it: 503. A tenant "
        "may always hold one body of the largest size, and more as long as it leaves as much free as it "
        "holds; else 429. Unset: an eighth of the memory there is at the start, at least four times "
        "`body_bytes`, at most 2 GiB.",
    )
    body_depth: int = Field(64, ge=4, le=190, description="Deepest nesting of a JSON body; above it: 400.")
    body_values: int = Field(
        300_000,
        ge=1000,
        description="Most commas and colons in a JSON body, which tell how many values it holds.",
    )
    n: int = Field(64, ge=1, description="Most answers to one prompt: `n`, `best_of`.")
    max_tokens: int = Field(
        1_048_576, ge=1, description="Most tokens that may be asked for, under any of the field's names."
    )
    logprobs: int = Field(20, ge=0, description="Most log probabilities per token; -1, all, counts as more.")
    stop: int = Field(16, ge=1, description="Most strings in `stop`, `stop_sequences` and `bad_words`.")
    messages: int = Field(4096, ge=1, description="Most messages, or items, of one conversation.")
    prompts: int = Field(
        1024, ge=1, description="Most prompts or inputs of one request, and most answers to all of them."
    )
    schema_bytes: ByteSize = Field(
        ByteSize(64 * KIB), ge=64, description="Largest JSON schema, also of one tool, as compact JSON."
    )
    schema_depth: int = Field(
        32, ge=4, description="Deepest nesting of a JSON schema, a pattern or a grammar."
    )
    pattern_bytes: int = Field(1024, ge=1, description="Longest regular expression, in characters.")
    grammar_bytes: ByteSize = Field(ByteSize(64 * KIB), ge=64, description="Longest grammar.")
    schema_cost: int = Field(
        5000,
        ge=1,
        description="Most that all schemas, tools and patterns of one request may cost to compile, in "
        "units of about a millisecond.",
    )
    schema_s: float = Field(
        2.0,
        ge=0,
        le=60,
        description="Processor seconds that one of them may take to compile on trial, with a small "
        "vocabulary, before an engine gets it; above it: 400. 0: no trial.",
    )
    logprob_values: int = Field(
        4_194_304,
        ge=1,
        description="Most log probabilities one request may ask for: prompts times `n` times tokens times "
        "those of each token.",
    )
    xargs: tuple[str, ...] = Field(
        (), description="Keys of `vllm_xargs` that clients may set; the others are dropped."
    )


class ImageSettings(Frozen):
    """`[images]`: what an image in a request may be, and where one that is only named may come from."""

    count: int = Field(16, ge=0, description="Most images of one request, whatever the model takes; 0: none.")
    file_bytes: ByteSize = Field(ByteSize(16 * MIB), ge=1024, description="Largest image file, decoded.")
    request_bytes: ByteSize = Field(
        ByteSize(64 * MIB),
        ge=1024,
        description="Most bytes of all images of one request together, as the model is given them.",
    )
    pixels: int = Field(25_000_000, ge=64, description="Most pixels of one image: width times height.")
    side_max: int = Field(16_384, ge=8, description="Longest side of an image, in pixels.")
    side_min: int = Field(4, ge=1, description="Shortest side of an image, in pixels.")
    aspect: int = Field(100, ge=1, description="How many times longer one side may be than the other.")
    threads: int = Field(
        2,
        ge=1,
        le=64,
        description="Images of one tenant read at once; more wait. Others have threads beside these.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Hosts that image URLs may name: `example.org`, `*.example.org`, an IP address, each "
        "with `:port` if it is not the usual one. Empty: images come inside requests only.",
    )
    fetches: int = Field(
        16,
        ge=1,
        le=1024,
        description="Images of one tenant fetched at once; more wait `fetch_s` at most. "
        "Others have places beside these.",
    )
    allow_http: bool = Field(False, description="Fetch from these hosts over plain http too.")
    fetch_s: float = Field(10.0, gt=0, le=600, description="Seconds one image may take to be fetched.")


class SupervisionSettings(Frozen):
    """`[supervision]`: what happens to an engine that dies or hangs."""

    hang_s: float = Field(
        60.0,
        ge=0,
        description="Seconds an engine with work may make no progress; then it is ended and started anew. "
        "Never less than four times its longest step so far; 0: never.",
    )
    restarts: int = Field(
        5, ge=0, description="Restarts of one engine within `window_s`; above it: it stays down, as `failed`."
    )
    window_s: float = Field(600.0, gt=0, description="Seconds within which restarts are counted.")
    backoff_s: float = Field(
        1.0, ge=0, description="Seconds before the second restart in a row, doubled for each one after it."
    )
    backoff_max_s: float = Field(60.0, ge=0, description="Longest wait before a restart.")


class EdgeSettings(Frozen):
    """`[edge]`: what a client may make the gateway wait for, and how many may be connected."""

    header_s: float = Field(
        10.0, gt=0, le=3600, description="Seconds a request's head may take to arrive; then 408."
    )
    body_s: float = Field(
        30.0, gt=0, le=3600, description="Seconds the gateway waits for a body in all; then 408."
    )
    body_bytes_per_s: ByteSize = Field(
        ByteSize(64 * KIB),
        ge=1,
        description="A body that comes at least so fast may take longer than `body_s`.",
    )
    send_s: float = Field(
        30.0, gt=0, le=3600, description="Seconds a client may leave its answer unread; then it is cut off."
    )
    keep_alive_s: float = Field(
        15.0,
        ge=0,
        le=3600,
        description="Seconds without an event of a stream before each comment, for proxies. 0: none.",
    )
    connections: int = Field(10_000, ge=1, description="Open connections; above it: 503.")
    allowed_hosts: tuple[HostName, ...] = Field(
        (),
        description="Hosts the gateway is known as, besides loopback's: `example.org`, `*.example.org`, "
        "an IP address, each without a port. Empty: any, but on loopback without keys none.",
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
        description="Of these, how many at once after a pause; unset: those of ten seconds.",
    )
    engine_requests: int = Field(
        256,
        ge=1,
        description="Requests of one tenant that an engine is given at once; more wait. "
        "Others have places beside these: one for eight.",
    )
    engine_waiting: int = Field(
        1024, ge=0, description="Requests that may wait for one engine; above it: 503."
    )
    wait_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Seconds a request waits for an engine, a thread for its body or its images; then 503.",
    )
    memory_reserve: ByteSize = Field(
        ByteSize(256 * MIB),
        ge=0,
        description="Memory that is kept free: below it new work gets 503. 0: never.",
    )


class MetricsSettings(Frozen):
    """`[metrics]`: where `/metrics` answers when the gateway has keys, or is not on loopback."""

    host: str = Field("127.0.0.1", description="Address of the separate metrics port.")
    port: int = Field(8001, ge=0, le=65535, description="The separate metrics port; 0 picks one.")


class HandoffSettings(Frozen):
    """`[handoffs]`: where KV waits for the next request, and for how long."""

    store: str | None = Field(
        None,
        pattern=r"^file:/",
        description="`file:` and a folder; unset: a folder of this user in shared memory, else in the cache.",
    )
    budget: ByteSize = Field(
        ByteSize(2048 * MIB),
        ge=MIB,
        description="Bytes of KV, images and records kept; the least recently used KV goes first.",
    )
    fsync: bool = Field(
        False,
        description="Wait for the device before KV is kept: for a store that is to outlive a power cut.",
    )
    verify: bool = Field(
        True,
        description="Prove every chunk of KV before it is used; off, only what it says of itself is proved.",
    )
    ttl_s: int = Field(
        3600, ge=1, le=30 * 86400, description="Seconds a handoff lives unless it asks for fewer."
    )
    max_life_s: int = Field(
        86400,
        ge=1,
        le=365 * 86400,
        description="Seconds a handoff lives in all, however often it is given more; at least `ttl_s`.",
    )
    wait_s: float = Field(
        10.0, ge=0, le=600, description="Seconds a request waits for a pending handoff; then 409."
    )
    image_bytes: ByteSize = Field(
        ByteSize(32 * MIB),
        ge=1024,
        description="Bytes of images one handoff may keep; all, with the records, take half of the budget.",
    )
    latent_steps_max: int = Field(
        64, ge=0, le=1024, description="Most latent steps one request may ask for, of engines that take them."
    )


class PoolingSettings(Frozen):
    """`[pooling]`: what IO processor plugins may take, per engine."""

    requests: int = Field(
        8,
        ge=1,
        description="Requests of one tenant that a plugin works on at once; more wait. "
        "Others have places beside these: one for eight.",
    )
    waiting: int = Field(64, ge=0, description="Requests that may wait for that; above it: 503.")
    wait_s: float = Field(
        300.0, gt=0, le=3600, description="Seconds a request waits for the plugin; then 503."
    )
    prompts: int = Field(16, ge=1, le=1024, description="Prompts of one request in the engine at once.")
    threads: int = Field(16, ge=1, le=256, description="Threads for what a plugin does synchronously.")
    time_limit_s: float = Field(900.0, gt=0, description="Seconds a request may take; then 504.")
    upload_bytes: ByteSize = Field(
        ByteSize(2048 * MIB), ge=1024, description="Largest file sent as it is; above it: 413."
    )
    uploads_bytes: ByteSize | None = Field(
        None,
        ge=2048,
        description="Most bytes of the files of all requests under way together; above it: 503, and above a "
        "tenant's share of it: 429. Unset: eight times `upload_bytes`.",
    )
    spool_dir: Path | None = Field(
        None,
        description="Where files sent as they are wait for the plugin: a folder of this user or of root, "
        "no link; unset: the system's folder.",
    )

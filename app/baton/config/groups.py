"""Define the settings, group by group."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, model_validator

KIB = 1024
MIB = 1024 * KIB


class Frozen(BaseModel):
    """A group of settings: read-only, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LimitSettings(Frozen):
    """`[limits]`: what a request may weigh before it is read."""

    body_bytes: ByteSize = Field(
        ByteSize(32 * MIB), ge=1024, description="Largest request body; above it: 413."
    )
    bodies_bytes: ByteSize | None = Field(
        None,
        ge=2048,
        description="Most bytes that the bodies of all requests under way hold together; above it: 503. A "
        "tenant may always hold one body of the largest size, and more as long as it leaves as much free as "
        "it holds; else 429. Without keys everybody shares all of it. Unset: an eighth of the memory there "
        "is at the start, at least four times `body_bytes`, at most 2 GiB.",
    )
    body_depth: int = Field(
        64,
        ge=4,
        le=190,
        description="Deepest nesting of a JSON body; above it: 400, as for all limits below.",
    )
    body_values: int = Field(
        300_000,
        ge=1000,
        description="Most commas and colons in a JSON body, those within texts too: they tell how "
        "many values it holds.",
    )
    n: int = Field(64, ge=1, description="Most answers to one prompt: `n`, `best_of`.")
    max_tokens: int = Field(
        1_048_576,
        ge=1,
        description="Most tokens that may be asked for, under any of the field's names: "
        "`max_tokens`, `max_completion_tokens`, `max_output_tokens`, `min_tokens`, ...",
    )
    cut_max_tokens: bool = Field(
        True,
        description="Whether `max_tokens`, under any of its names, is an upper bound: above what a prompt "
        "leaves of the model's context it is cut to that, and the header `X-Baton-Max-Tokens` of the answer "
        "says to what. False: 400.",
    )
    logprobs: int = Field(
        20,
        ge=0,
        description="Most log probabilities per token: `logprobs`, `top_logprobs`, "
        "`prompt_logprobs`. The value -1, which means all, counts as more.",
    )
    stop: int = Field(
        16,
        ge=1,
        description="Most strings in `stop`, `stop_sequences` and `bad_words`, of 1024 characters each.",
    )
    messages: int = Field(
        4096, ge=1, description="Most messages or items of one conversation, and parts of one message."
    )
    prompts: int = Field(
        1024, ge=1, description="Most prompts or inputs of one request, and most answers to all of them."
    )
    schema_bytes: ByteSize = Field(
        ByteSize(64 * KIB), ge=64, description="Largest JSON schema, also of one tool, as compact JSON."
    )
    schema_depth: int = Field(
        32, ge=4, description="Deepest nesting of a JSON schema, of a pattern's groups, of a grammar's."
    )
    pattern_bytes: int = Field(
        1024, ge=1, description="Longest regular expression, in characters, also within schemas."
    )
    grammar_bytes: ByteSize = Field(ByteSize(64 * KIB), ge=64, description="Longest grammar.")
    schema_cost: int = Field(
        5000,
        ge=1,
        description="Most that all schemas, tools and patterns of one request may cost to compile, "
        "in units of about a millisecond.",
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
        description="Most log probabilities one request may ask for: prompts times `n` times "
        "tokens times those of each token.",
    )
    xargs: tuple[str, ...] = Field(
        (), description="Keys of `vllm_xargs` that clients may set; the others are dropped."
    )


class ImageSettings(Frozen):
    """`[images]`: what an image in a request may be, and where one that is only named may come from."""

    count: int = Field(16, ge=0, description="Most images of one request, whatever the model takes; 0: none.")
    file_bytes: ByteSize = Field(
        ByteSize(16 * MIB),
        ge=1024,
        description="Largest image file, decoded. In a JSON body it is a third longer, see "
        "`limits.body_bytes`.",
    )
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
        description="Images of one tenant read at once, each with up to sixteen bytes of memory a pixel; "
        "more wait. One thread for every eight, rounded up, comes on top for other tenants.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Hosts that image URLs may name: `example.org`, `*.example.org`, an IP address, each "
        "with `:port` if it is not the usual one. Empty: none is fetched.",
    )
    fetches: int = Field(
        16,
        ge=1,
        le=1024,
        description="Images of one tenant fetched at once, each of `file_bytes` at most; more wait, and get "
        "503 after `fetch_s`. One place for every eight, rounded up, comes on top for other tenants.",
    )
    allow_http: bool = Field(False, description="Fetch from these hosts over plain http too.")
    fetch_s: float = Field(
        10.0, gt=0, le=600, description="Seconds that fetching one image may take, redirects included."
    )


class ResponseSettings(Frozen):
    """`[responses]`: how answers of `/v1/responses` are stored, for `previous_response_id`."""

    budget: ByteSize = Field(
        ByteSize(256 * MIB),
        ge=0,
        description="Bytes of stored responses; the least recently used of the tenant with most bytes make "
        "room. 0: no response is stored.",
    )
    ttl_s: int = Field(
        30 * 86400, ge=1, le=365 * 86400, description="Seconds a response is stored, as long as OpenAI does."
    )
    folder: Path | None = Field(
        None,
        description="Folder of this user's, where they are stored. Unset: the folder `responses` in that of "
        "`handoffs.store`.",
    )


class BatchSettings(Frozen):
    """`[batches]`: files of clients, and batches of requests that run while nobody else asks."""

    enabled: bool = Field(
        True,
        description="Whether `/v1/files` and `/v1/batches` answer; see "
        "[Run batches](../how-to/run-batches.md).",
    )
    folder: Path | None = Field(
        None,
        description="Folder of this user's, on a disk of this machine, where files, answers and batches are "
        "kept; gateways that share it share them, and one of them runs them. Unset: "
        "`~/.local/share/baton/batches`, made with the first file.",
    )
    lines: int = Field(
        8,
        ge=1,
        le=1024,
        description="Lines of batches that an engine works on at once while it has nothing else to do, and "
        "of one batch that are under way.",
    )
    lines_beside: int = Field(
        0,
        ge=0,
        le=1024,
        description="Those of them that go on while it has requests of clients. The others give way: they "
        "are ended and begin again later. 0: a gateway that is never quiet runs no batch.",
    )
    quiet_s: float = Field(
        1.0,
        ge=0,
        le=3600,
        description="Seconds without a request after which an engine has nothing else to do.",
    )
    file_bytes: ByteSize = Field(ByteSize(200 * MIB), ge=1024, description="Largest file; above it: 413.")
    file_lines: int = Field(50_000, ge=1, le=1_000_000, description="Most requests of one batch.")
    tenant_files: int = Field(
        1000, ge=1, description="Files of one tenant, those that batches wrote among them; above it: 403."
    )
    tenant_bytes: ByteSize = Field(
        ByteSize(4096 * MIB),
        ge=1024,
        description="Bytes of the files and answers of one tenant. Above it an upload is 403, and a batch "
        "waits until files are deleted or it expires.",
    )
    total_bytes: ByteSize = Field(
        ByteSize(16384 * MIB), ge=1024, description="The same of all tenants together."
    )
    tenant_batches: int = Field(
        32, ge=1, description="Batches of one tenant that have not ended; above it: 403."
    )
    ttl_s: int = Field(
        30 * 86400,
        ge=3600,
        le=365 * 86400,
        description="Seconds that a file lives unless its upload or its batch asks for fewer "
        "(`expires_after`, `output_expires_after`), and that a batch is shown once its window is over.",
    )


class SceneSettings(Frozen):
    """`[scenes]`: the jobs of `/v1/scenes`, whose files are kept."""

    budget: ByteSize = Field(
        ByteSize(2048 * MIB),
        ge=0,
        description="Bytes of kept files; the oldest scenes of the tenant with most bytes make room. 0: no "
        "scene is kept.",
    )
    ttl_s: int = Field(86400, ge=1, le=365 * 86400, description="Seconds a scene's files are kept.")
    at_once: int = Field(
        4, ge=1, le=256, description="Jobs of one tenant under way at once; more wait. One more for others."
    )
    waiting: int = Field(64, ge=0, description="Jobs that may wait; above it: 503.")
    folder: Path | None = Field(
        None,
        description="Folder of this user's, where they are kept. Unset: the folder `scenes` in that of "
        "`handoffs.store`; where that is unset too, in `~/.cache/baton`.",
    )


def _checked(url: str) -> str:
    """Return a server's address without `/v1` and slashes at its end."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("give an address such as `http://10.0.0.7:8000`")
    if parts.port == 0:
        raise ValueError("port 0 is no port that a server listens on")
    if parts.username is not None or parts.password is not None:
        raise ValueError("leave name and password out; the key belongs into `remote.key_file`")
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise ValueError("leave out what follows `?` or `#`")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("the address may hold no spaces, control characters or letters beyond ASCII")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


ServerUrl = Annotated[str, AfterValidator(_checked)]


class RemoteSettings(Frozen):
    """`[engines.remote]`: how the server at an engine's `url` is asked."""

    key_file: Path | None = Field(
        None,
        description="File with the API key that the server is sent, read again when it changes. Clients' own "
        "keys are never sent on. Unset: none is sent.",
    )
    keys_dir: Path | None = Field(
        None,
        description="Folder with one file a tenant, named as the tenant is, with this tenant's own key for "
        "the server, so that tenants are apart there too. Tenants without a file are sent the key of "
        "`key_file`.",
    )
    ca_file: Path | None = Field(
        None, description="Certificates to trust with `https://`. Unset: those of public authorities."
    )
    images: bool = Field(
        False,
        description="Whether the server's model takes images. They are read and checked here, and sent on as "
        "they were decoded.",
    )
    connect_s: float = Field(5.0, gt=0, le=600, description="Seconds that a connection may take; then 502.")
    answer_s: float = Field(
        600.0,
        gt=0,
        le=86400,
        description="Seconds until an answer must have begun, which in one piece is when all of it has been "
        "computed, and as many until the rest of such an answer is there; then 504.",
    )
    silence_s: float = Field(
        300.0, gt=0, le=86400, description="Seconds an answer may pause once it has begun; then 504."
    )
    answer_bytes: ByteSize = Field(
        ByteSize(64 * MIB),
        ge=64 * KIB,
        description="Largest answer in one piece, and largest event of a stream; above it: 502.",
    )
    probe_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Seconds between two looks at whether the server answers; each asks for `/v1/models`.",
    )
    failures: int = Field(
        3,
        ge=1,
        le=1000,
        description="Connections that must fail in a row before the engine counts as `unreachable`: its "
        "requests get 503 until the server answers again.",
    )


AutomaticMode = Literal["off", "load", "on"]


class HandoffSettings(Frozen):
    """`[handoffs]`: where KV waits for the next request, and for how long."""

    store: str | None = Field(
        None,
        pattern=r"^file:/",
        description="Where handoffs' KV is kept: `file:/ABSOLUTE/FOLDER`, in memory or on disk, on no "
        "network file system. Unset: a folder of this user in `/dev/shm`, else in the user's cache.",
    )
    budget: ByteSize = Field(
        ByteSize(2048 * MIB),
        ge=MIB,
        description="Bytes of KV, images and records kept, on disk or in shared memory; the least "
        "recently used KV is evicted first.",
    )
    shared: str | None = Field(
        None,
        pattern=r"^(unix|(valkeys?|rediss?)(\+cluster|\+sentinel)?)://[^\s]+$",
        repr=False,  # it may hold a password
        description="A Valkey or Redis server through which gateways on several machines share their "
        "handoffs: `valkey://HOST:PORT/DB`, or `valkeys://` for TLS, with `USER@` for an ACL user. "
        "A cluster: `valkey+cluster://HOST:PORT`. Sentinel: `valkey+sentinel://HOST:PORT,HOST:PORT/NAME`. "
        "Unset: only gateways that share `store` share handoffs.",
    )
    shared_secret_file: Path | None = Field(
        None,
        description="File with a secret of at least 32 characters or bytes, the same on all machines that "
        "share handoffs, from which the key of all digests of KV is made. Needed with `shared`.",
    )
    shared_password_file: Path | None = Field(
        None, description="File with the password for the shared store. Unset: none, or the address has it."
    )
    shared_ca_file: Path | None = Field(
        None, description="Certificates to trust with `valkeys://`. Unset: the system's."
    )
    shared_pool: str = Field(
        "baton",
        pattern=r"^[a-z0-9][a-z0-9-]{0,31}$",
        description="What all keys in the shared store begin with; gateways of one pool share handoffs.",
    )
    shared_budget: ByteSize = Field(
        ByteSize(8192 * MIB),
        ge=MIB,
        description="Bytes of KV, images and records in the shared store; the same on all machines, and "
        "below the server's `maxmemory`.",
    )
    shared_timeout_s: float = Field(
        1.0, gt=0, le=60, description="Seconds that one exchange with the shared store may take."
    )
    shared_fetch_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="Seconds in which a handoff must have been fetched from the shared store; then it is "
        "computed.",
    )
    archive: str | None = Field(
        None,
        pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_.-]+)*/?$",
        description="An S3 bucket, `s3://BUCKET/PREFIX`, in which pinned and long-lived handoffs are kept "
        "too, so that they outlive this machine's store and the shared one. Needs `shared_secret_file`. "
        "Unset: none.",
    )
    archive_after_s: int = Field(
        86400,
        ge=1,
        le=365 * 86400,
        description="Handoffs that live at least so many seconds are archived, beside those that are pinned.",
    )
    archive_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^\s/]+/?$",
        description="Address of an S3 service other than AWS's, such as `https://s3.example.org`. Unset: "
        "`AWS_ENDPOINT_URL` in the environment, else AWS.",
    )
    archive_region: str | None = Field(
        None,
        pattern=r"^[a-z0-9-]+$",
        description="Region of the bucket. Unset: `AWS_REGION` in the environment, else `us-east-1`.",
    )
    archive_key_file: Path | None = Field(
        None,
        description="File with the id of an access key and its secret, each on a line. Unset: the `AWS_*` "
        "variables of the environment, else the role of the container or the instance.",
    )
    archive_ca_file: Path | None = Field(
        None, description="Certificates to trust for the archive. Unset: the system's."
    )
    archive_timeout_s: float = Field(
        2.0, gt=0, le=60, description="Seconds that a look-up or a change in the archive may take."
    )
    archive_fetch_s: float = Field(
        20.0,
        gt=0,
        le=600,
        description="Seconds in which a handoff must have been fetched from the archive; then it is "
        "computed.",
    )
    archive_rate: ByteSize | None = Field(
        None,
        ge=64 * 1024,
        description="Bytes that the gateway writes to the archive in a second, at most. Unset: no limit.",
    )
    fsync: bool = Field(
        False,
        description="Wait for the device before KV counts as kept: for a store that is to outlive "
        "a power cut.",
    )
    unproven_devices: bool = Field(
        False,
        description="Allow `handoff` on NVIDIA GPUs where it is not proved: with tensor parallelism, "
        "quantised KV, sliding windows, MLA, running states, groups of different shape, speculative "
        "decoding, images, vLLM's first model runner.",
    )
    verify: bool = Field(
        True,
        description="Verify every chunk of KV before it is used. Off: only an entry's description "
        "and token ids are verified.",
    )
    resident: ByteSize = Field(
        ByteSize(256 * MIB),
        ge=0,
        description="Bytes of KV that stay in each engine's memory once they were saved or verified there, "
        "so that later loads are as fast as a copy; tenants share them as they share `budget`, an "
        "engine's ranks equally. 0: none do.",
    )
    ttl_s: int = Field(
        3600, ge=1, le=30 * 86400, description="Seconds a handoff lives unless it asks for fewer."
    )
    max_life_s: int = Field(
        86400,
        ge=1,
        le=365 * 86400,
        description="Seconds a handoff lives in all, however often its life is extended; at least `ttl_s`.",
    )
    wait_s: float = Field(
        10.0, ge=0, le=600, description="Seconds a request waits for a pending handoff; then 409."
    )
    auto: AutomaticMode = Field(
        "on",
        description="What engines with `handoff = true` do for requests that name no handoff: `load` starts "
        "them from the tenant's stored context that shares the longest prefix with the prompt, and saves "
        "what clients ask to be cached; `on` also saves what is likely to be continued; `off`: nothing.",
    )
    auto_min_tokens: int = Field(
        128,
        ge=32,
        description="Fewest tokens, beyond those that are stored already, that are saved automatically.",
    )
    audit: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of the requests that load KV whose first token is computed again without it, when "
        "the engine has nothing else to do, and compared. 0: none.",
    )
    audit_tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest difference of a log probability, in nats, that such an audit accepts. What is "
        "above it is counted as a mismatch, and the KV is moved to the store's quarantine. Unset: 0.001 for "
        "engines that compute in float32, 1 for others.",
    )
    image_bytes: ByteSize = Field(
        ByteSize(32 * MIB),
        ge=1024,
        description="Bytes of images one handoff may keep; with more it is not made (400). All "
        "images, with the records, take half of the budget at most.",
    )
    rosetta: bool = Field(
        False,
        description="Experimental: whether requests may start from one vector that stands for another "
        "model's last thought (`translate` with `via: rosetta`). On the models tried it carried nothing.",
    )
    latent_steps_max: int = Field(
        64,
        ge=0,
        le=1024,
        description="Most latent steps one request may ask for, of engines with `latent = true`.",
    )

    @property
    def fetch_s(self) -> float:
        """Seconds in which a handoff must have been fetched from wherever it is."""
        return max(self.shared_fetch_s, self.archive_fetch_s if self.archive is not None else 0.0)

    @property
    def whole_budget(self) -> int:
        """Bytes that the handoffs of all gateways that share them may take."""
        return int(self.shared_budget if self.shared is not None else self.budget)


CPU_KV_CACHE_BYTES = 512 * MIB
"""KV pool of an engine on a CPU whose settings name none, so that two engines fit on a laptop."""

EngineName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
Alias = Annotated[str, Field(pattern=r"^[A-Za-z0-9*][A-Za-z0-9._:/*-]{0,127}$")]
"""A name, or a pattern of names: `*` stands for any characters."""


HostName = Annotated[
    str,
    Field(
        pattern=r"^((\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*)$", max_length=255
    ),
]


def _as_browsers_send(origin: str) -> str:
    """Refuse an origin that no browser sends, which would never match."""
    usual = origin.startswith("https://") and origin.endswith(":443")
    if origin != origin.lower() or usual or (origin.startswith("http://") and origin.endswith(":80")):
        raise ValueError("write it as browsers send it: in small letters, without the scheme's usual port")
    return origin


Origin = Annotated[
    str,
    Field(pattern=r"^(\*|[A-Za-z][A-Za-z0-9+.-]*://[^/?#@\s*]+)$", max_length=300),
    AfterValidator(_as_browsers_send),
]


Method = Annotated[str, Field(pattern=r"^(\*|[A-Z]+)$", max_length=20)]
HeaderName = Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$", max_length=100)]


OF_OUR_OWN_ENGINES = (
    "kv_cache_memory", "gpu_share", "start", "idle_s", "memory", "pin", "auto", "translate", "latent",
    "io_processor", "classic_plugin", "adapters", "args", "serving",
)  # fmt: skip
"""Settings of an engine that runs here, which say nothing of another server."""


class EngineSettings(Frozen):
    """One `[[engines]]` table: one vLLM engine, or another server."""

    name: EngineName = Field(description="The word by which a request's `model` picks this engine.")
    aliases: tuple[Alias, ...] = Field(
        (),
        description="Further words for it in `model`; `/v1/models` lists them too. Names and "
        "aliases are unique over all engines. `*` stands for any characters (`claude-*`): such a pattern "
        "picks the engine where no name fits, the first that does, and is not listed.",
    )
    default: bool = Field(
        False,
        description="Whether requests that name no `model` get this engine, where several of its `runner` "
        "could answer. One engine of a `runner` at most.",
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
        description="Size of the KV pool. Unset: 512 MiB on a CPU without `args.gpu_memory_utilization`, "
        "vLLM's own choice on a GPU. "
        "On a GPU that several engines share, set `gpu_share` instead.",
    )
    gpu_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of its GPUs' memory that the engine may take, with weights and KV pool. "
        "Unset: engines on the same GPU share 0.92 of it equally; one alone takes vLLM's default.",
    )
    start: Literal["always", "on_demand"] = Field(
        "always",
        description="`always`: with the gateway. `on_demand`: for the first request, and again after it was "
        "unloaded; see [Models that come and go](../how-to/models-on-demand.md).",
    )
    idle_s: float | None = Field(
        None,
        ge=0,
        description="Seconds without a request after which an engine on demand is unloaded. Unset: it stays "
        "until another one needs its room.",
    )
    memory: ByteSize | None = Field(
        None,
        ge=MIB,
        description="Memory that the engine takes of `on_demand.budget`; on GPUs leave it out, `gpu_share` "
        "says it. Unset: its weights, its KV pool and 1 GiB. What it is measured to take beyond that counts.",
    )
    pin: bool = Field(
        False, description="Whether an engine on demand is never unloaded once it runs, but by an operator."
    )
    group: EngineName | None = Field(
        None,
        description="A further word for `model`, which several engines of one `runner` share: it picks the "
        "ready one with the fewest requests, and before it the one that made the handoff which a request "
        "continues.",
    )
    fallback: tuple[EngineName, ...] = Field(
        (),
        description="Names of engines or groups that answer, in this order, where this engine cannot before "
        "the first token: it is not ready, is full, or is lost. The answer's header `X-Baton-Fallback` names "
        "the engine.",
    )
    handoff: bool = Field(
        False,
        description="Whether requests may leave their KV behind as a handoff, and start from one. With "
        "`url`: where the server is a Baton over the same store.",
    )
    auto: AutomaticMode | None = Field(
        None, description="Whether handoffs of this engine are automatic. Unset: as `handoffs.auto` says."
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
    adapters: dict[EngineName, Path] = Field(
        default_factory=dict,
        description="LoRA adapters by name, each a folder with `adapter_config.json` and "
        "`adapter_model.safetensors`: further models on the engine's weights, see "
        "[Serve LoRA adapters](../how-to/lora-adapters.md). `args.max_loras` bounds how many there may be, "
        "with those that operators load; unset: these and 4 more.",
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
        stays = [name for name in ("idle_s", "pin") if self._given(name)] if self.start == "always" else []
        if stays:
            raise ValueError(
                f"engines '{self.name}': `{stays[0]}` is for engines with `start = \"on_demand\"`: others "
                "are never unloaded"
            )
        if self.pin and self.idle_s is not None:
            raise ValueError(
                f"engines '{self.name}': `pin` and `idle_s` contradict each other: leave one out"
            )
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
    def names(self) -> tuple[str, ...]:
        """The names under which it is listed: all but patterns."""
        return (self.name, *(alias for alias in self.aliases if "*" not in alias))

    @property
    def own(self) -> bool:
        """True if the engine runs here, and is no other server."""
        return self.url is None

    @property
    def ranks(self) -> int:
        """Number of processes over which `args` split the model."""
        split = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        return math.prod(int(self.args.get(name) or 1) for name in split)

    @property
    def forkable(self) -> bool:
        """True if the fork server may start the engine: with ranks, vLLM binds each one's threads itself."""
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
    audit_file: Path | None = Field(
        None,
        description="File to which what operators do, and every deletion, is added as a line of JSON: who, "
        "what, when, and what came of it. It is opened for each line, so that logrotate may move it at any "
        "time; nothing here rotates it. Unset: there is none.",
    )


class UsageSettings(Frozen):
    """`[usage]`: how the tokens of tenants, keys and models are counted, for `GET /v1/usage` and budgets."""

    file: Path | None = Field(
        None,
        description="SQLite file of the usage, on this machine; gateways that share it count together. "
        "Unset: `~/.local/state/baton/usage.sqlite`, and where that cannot be written none is counted, which "
        "is logged.",
    )
    keep_days: int = Field(
        400,
        ge=0,
        le=36500,
        description="Days with usage that are kept, the last ones; at least 31 where keys have budgets by "
        "month. 0: none is counted, and keys with budgets are refused.",
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
    resume_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="Seconds that a request whose engine was lost waits for another of the same weights, or "
        "for its own to be back; there it goes on where it was. 0: it fails.",
    )


class OnDemandSettings(Frozen):
    """`[on_demand]`: how engines with `start = "on_demand"` share memory, and how long requests wait."""

    budget: ByteSize | None = Field(
        None,
        ge=MIB,
        description="Memory that all engines of the gateway take together, those that always run too; on "
        "GPUs of each GPU. Unset: what is available at the start without `admission.memory_reserve`; on "
        "GPUs 0.92 of each.",
    )
    min_loaded_s: float = Field(
        30.0,
        ge=0,
        le=86400,
        description="Seconds that an engine stays once it is ready, before another may take its room: models "
        "that do not fit together take turns no faster.",
    )
    wait_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="Seconds that a request waits for its engine to be loaded; then 503, and at once where "
        "it is known to take longer.",
    )
    drain_s: float = Field(
        300.0,
        ge=0,
        le=86400,
        description="Seconds that running requests get to end before their engine makes room for another.",
    )
    start_s: float = Field(
        600.0, gt=0, le=86400, description="Seconds that one start may take; then it has failed."
    )


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
    event_streams: int = Field(
        8, ge=0, description="Streams of `GET /v1/events` that one key may have open; above it: 429."
    )
    allowed_hosts: tuple[HostName, ...] = Field(
        (),
        description="Hosts the gateway is known as, besides `localhost` and loopback addresses: "
        "`example.org`, `*.example.org`, an IP address, each without a port. Empty: "
        "any; but on loopback without keys no other.",
    )
    allowed_origins: tuple[Origin, ...] = Field(
        (),
        description="Origins of web pages whose scripts may use the gateway (CORS): `https://app.example`, "
        "`http://localhost:3000`, `app://localhost`, or `*` with keys: any. Empty: pages of other sites "
        "read nothing.",
    )
    allowed_methods: tuple[Method, ...] = Field(
        ("DELETE", "GET", "HEAD", "PATCH", "POST"),
        description="Methods that these pages may use; `*`: any.",
    )
    allowed_headers: tuple[HeaderName, ...] = Field(
        ("*",), description="Headers that these pages may send; `*`: any."
    )
    allow_credentials: bool = Field(
        False,
        description="Whether browsers send these pages' cookies along, which a proxy before the gateway may "
        "want; the gateway's own keys need it not. Not with the origin `*`.",
    )
    mcp: bool = Field(
        True,
        description="Whether `/mcp` offers tools by the Model Context Protocol, to whoever may use the "
        "gateway; see [Use the gateway as tools](../how-to/mcp.md).",
    )

    @model_validator(mode="after")
    def _cookies_go_to_named_origins(self) -> EdgeSettings:
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError("allow_credentials: name the origins instead of '*' in `edge.allowed_origins`")
        return self


class TlsSettings(Frozen):
    """`[tls]`: the certificate of a gateway that speaks HTTPS itself."""

    cert_file: Path | None = Field(
        None,
        description="The certificate and those that sign it, as PEM. It is read again when it changes, "
        "as are the other two files. Unset: plain HTTP.",
    )
    key_file: Path | None = Field(None, description="Its private key, as PEM. Unset: it is in `cert_file`.")
    ca_file: Path | None = Field(None, description="Certificates that sign those of clients, as PEM.")
    client_certs: Literal["none", "optional", "required"] = Field(
        "none",
        description="Whether clients show a certificate that `ca_file` signs. It does not stand for a key.",
    )
    ciphers: str | None = Field(
        None, min_length=1, description="Ciphers of TLS 1.2, as OpenSSL lists them. Unset: Python's choice."
    )

    @model_validator(mode="after")
    def _nothing_without_a_certificate(self) -> TlsSettings:
        others = (self.key_file, self.ca_file, self.ciphers)
        if self.cert_file is None and (self.client_certs != "none" or any(others)):
            raise ValueError("cert_file: give the certificate too")
        if self.client_certs != "none" and self.ca_file is None:
            raise ValueError("ca_file: give the certificates that sign those of clients")
        return self


class AdmissionSettings(Frozen):
    """`[admission]`: how much is let in at once, and how what must wait is served."""

    tenant_requests: int = Field(
        0, ge=0, description="Requests of one tenant at once; above it: 429. 0: no limit."
    )
    tenant_rate: float = Field(
        0.0, ge=0, description="Requests one tenant may make a minute; above it: 429. 0: no limit."
    )
    tenant_burst: int | None = Field(
        None, ge=1, description="Of these, how many at once after a pause. Unset: those of ten seconds."
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


class UiSettings(Frozen):
    """`[ui]`: the page for people at `/`."""

    enabled: bool = Field(
        True,
        description="Whether `/` is a page to chat on, and to look at contexts and engines. Its files need "
        "no key, the data that it shows does.",
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
        description="Most bytes of the uploaded files of all requests under way together; above it: 503, and "
        "above a tenant's share of it: 429. Unset: eight times `upload_bytes`.",
    )
    spool_dir: Path | None = Field(
        None,
        description="Where uploaded files wait for the plugin: a folder of this user or of root, no link. "
        "Unset: the system's folder for temporary files. A start removes what a killed gateway left there.",
    )

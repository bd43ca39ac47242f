"""The groups of the settings file that bound requests and what is stored of them."""

from __future__ import annotations

from pathlib import Path

from pydantic import ByteSize, Field

from baton.config.frozen import KIB, MIB, Frozen


class LimitSettings(Frozen):
    """`[limits]`: what a request may weigh before it is read."""

    body_bytes: ByteSize = Field(
        ByteSize(32 * MIB), ge=1024, description="Largest request body; above it: 413."
    )
    bodies_bytes: ByteSize | None = Field(
        None,
        ge=2048,
        description="Most bytes that the bodies of all requests under way hold together; above it: "
        "503. A tenant may always hold one body of the largest size, and more as long "
        "as it leaves as much free as it holds; else 429. Without keys everybody "
        "shares all of it. Unset: an eighth of the memory there is at the start, at "
        "least four times `body_bytes`, at most 2 GiB.",
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
        description="Images of one tenant read at once, each with up to sixteen bytes of memory a "
        "pixel; more wait. One thread for every eight, rounded up, comes on top for "
        "other tenants.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Hosts that image URLs may name: `example.org`, `*.example.org`, an IP "
        "address, each with `:port` if it is not the usual one. Empty: none is "
        "fetched.",
    )
    fetches: int = Field(
        16,
        ge=1,
        le=1024,
        description="Images of one tenant fetched at once, each of `file_bytes` at most; more "
        "wait, and get 503 after `fetch_s`. One place for every eight, rounded up, "
        "comes on top for other tenants.",
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

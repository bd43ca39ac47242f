"""Define the settings of handoffs: where their KV is kept, for how long, and who shares it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field

from baton.config.frozen import MIB, Frozen

AutomaticMode = Literal["off", "load", "on"]


class HandoffSettings(Frozen):
    """`[handoffs]`: where KV waits for the next request, and for how long."""

    store: str | None = Field(
        None,
        pattern=r"^file:/",
        description="Where handoffs' KV is kept: `file:/ABSOLUTE/FOLDER`, in memory or on disk, "
        "on no network file system. "
        "Unset: a folder of this user in `/dev/shm`, else in the user's cache.",
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
        "quantised KV, sliding windows, MLA, speculative decoding, images, vLLM's first model runner.",
    )
    verify: bool = Field(
        True,
        description="Verify every chunk of KV before it is used. Off: only an entry's description "
        "and token ids are verified.",
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

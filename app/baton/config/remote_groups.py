"""Define the settings of an engine that is another server: its address, its key, and how long it may take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, ByteSize, Field

from baton.config.frozen import KIB, MIB, Frozen


def _checked(url: str) -> str:
    """Return a server's address without `/v1` and slashes at its end.

    Raises:
        ValueError: it is no address of a server, or holds what does not belong there.
    """
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

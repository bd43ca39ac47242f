"""Name the archive's objects and seal what is written there, so that readers of the bucket learn little.

    gateways                      proves that all gateways have the same secret
    records/SCOPE/ID              a handoff's document: record and list of files; or that it was deleted
    files/SCOPE/DIGEST            a file of KV or an image, the same for all handoffs that need it
    needed/SCOPE/DIGEST/ID        empty: the handoff needs the file
    due/SECONDS/SCOPE.ID          the handoff's end: what to look at then, and the files that it needs

SCOPE, ID and the images' DIGEST are keyed BLAKE3 hashes of tenant, handoff id and content. A document begins
with its seal, a keyed BLAKE3 digest of its name and of what follows: nobody without the secret can write one,
or give one another's place. Prompts are not encrypted by it; that is left to the bucket.
"""

from __future__ import annotations

import hmac

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError

from baton.library.handoff import Handoff

PROOF = "gateways"
DUE = "due/"
SEAL_BYTES = 32
NAME_LENGTH = 40


class Tampered(Exception):
    """A document is not what a gateway with this secret wrote under this name."""

    def __init__(self, name: str, tag: str = "") -> None:
        super().__init__(name)
        self.tag = tag


class OtherVersion(Tampered):
    """A gateway of another version of Baton wrote a document, and this one cannot read it."""


class ArchivedFile(BaseModel):
    """A file that a handoff needs.

    Attributes:
        key: key of the entry whose own file it is, or an image's digest.
        name: name of the object that holds it.
        digest: keyed BLAKE3 digest of all of it, hexadecimal.
    """

    model_config = ConfigDict(frozen=True)

    key: str
    name: str
    size: int
    digest: str


class Document(BaseModel):
    """A handoff as the archive holds it.

    Attributes:
        record: its record; None: it was deleted, or has expired.
        files: its files of KV, its own last.
        deleted_at: when it was deleted, in seconds since the epoch.
    """

    model_config = ConfigDict(frozen=True)

    record: Handoff | None
    deleted_at: float = 0.0
    files: tuple[ArchivedFile, ...] = ()
    images: tuple[ArchivedFile, ...] = ()

    @property
    def objects(self) -> list[str]:
        """The names of all files that it needs."""
        return [each.name for each in (*self.files, *self.images)]


class Due(BaseModel):
    """A handoff to look at when its life may have ended.

    Attributes:
        objects: names of the files that it needs.
    """

    objects: tuple[str, ...] = ()


class Names:
    """The names of objects, and the seals of documents.

    Args:
        secret: the same for all gateways of the archive.
    """

    def __init__(self, secret: bytes) -> None:
        self._name_key = blake3(secret, derive_key_context="baton archive 2026 names").digest()
        self._seal_key = blake3(secret, derive_key_context="baton archive 2026 seals").digest()
        self._file_key = blake3(secret, derive_key_context="baton archive 2026 files").digest()

    def proof(self) -> bytes:
        """Return the proof that a gateway has this secret."""
        return blake3(b"proof", key=self._seal_key).hexdigest().encode()

    def scope(self, tenant: str) -> str:
        """Return a tenant's name in the bucket."""
        return self._hash("tenant", tenant)

    def handoff(self, tenant: str, handoff_id: str) -> str:
        """Return a handoff's name in the bucket: its tenant's scope and a name of its own."""
        return f"{self.scope(tenant)}/{self._hash('handoff', tenant, handoff_id)}"

    def image(self, tenant: str, digest: str) -> str:
        """Return the name of the file of a tenant's image."""
        return f"files/{self.scope(tenant)}/{self._hash('image', tenant, digest)}"

    def file(self, tenant: str, seal: str) -> str:
        """Return the name of the file of a tenant's entry."""
        return f"files/{self.scope(tenant)}/{self._hash('kv', tenant, seal)}"

    def hasher(self) -> blake3:
        """Return an empty digest of a file."""
        return blake3(key=self._file_key)

    def seal(self, name: str, body: bytes) -> bytes:
        """Return a document as it is written under a name."""
        return self._digest(name, body) + body

    def unseal(self, name: str, data: bytes) -> bytes:
        """Return the body of a document, after a look at its seal.

        Raises:
            Tampered: it is not what a gateway wrote under this name.
        """
        seal, body = data[:SEAL_BYTES], data[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._digest(name, body)):
            raise Tampered(name)
        return body

    def _digest(self, name: str, body: bytes) -> bytes:
        return blake3(name.encode() + b"\0" + body, key=self._seal_key).digest()

    def _hash(self, kind: str, *parts: str) -> str:
        text = "\0".join((kind, *parts)).encode()
        return blake3(text, key=self._name_key).hexdigest()[:NAME_LENGTH]


def record_name(handoff: str) -> str:
    """Return the name of a handoff's document."""
    return f"records/{handoff}"


def needed_name(file: str, handoff: str) -> str:
    """Return the name of the object that says that a handoff needs a file."""
    return f"{needed_prefix(file)}{handoff.partition('/')[2]}"


def needed_prefix(file: str) -> str:
    """Return the prefix of the objects that each name one handoff which needs a file."""
    return f"needed/{file.removeprefix('files/')}/"


def due_name(handoff: str, at: float) -> str:
    """Return the name of the object by which a handoff's end is found."""
    return f"{DUE}{int(at) + 1:012d}/{handoff.replace('/', '.')}"


def parsed(name: str, body: bytes) -> Document:
    """Return the document that a sealed body under a name says.

    Raises:
        OtherVersion: it cannot be read.
    """
    try:
        return Document.model_validate_json(body)
    except ValidationError:
        raise OtherVersion(name) from None


def end_of(due: str) -> tuple[int, str]:
    """Return when a handoff is due and what it is called, by the name of such an object.

    Raises:
        ValueError: it is no such name.
    """
    _, seconds, handoff = due.split("/")
    scope, name = handoff.split(".")
    return int(seconds), f"{scope}/{name}"

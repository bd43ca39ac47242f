"""Define what passes to and from plugins: uploads, result files, descriptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Upload:
    """A file that a client sent as the request's body.

    Attributes:
        file: path of the temporary file; its maker removes it.
        media_type: as the client gave it.
        query: the request's other parameters.
        accept: the media types that the answer may have, the preferred one first.
    """

    file: Path
    media_type: str
    query: Mapping[str, str]
    accept: Sequence[str] = ()


@dataclass(frozen=True)
class ResultFile:
    """One file of a plugin's answer.

    Attributes:
        name: the file name that the client is offered.
        media_type: of its content.
        path: where it is, until the plugin's `forget` is called.
    """

    name: str
    media_type: str
    path: Path


@dataclass(frozen=True)
class Description:
    """A plugin's description of its answer, for a model that is asked about it.

    Attributes:
        text: a line or a few.
        picture: media type and bytes; None: there is none.
    """

    text: str
    picture: tuple[str, bytes] | None = None

"""The load and save jobs that the scheduler role sends to the worker role with each engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_kv.cache_groups import GroupBlocks
from baton_kv.contract import Mixture
from baton_kv.entry_format import ImageRef, Part
from baton_kv.moves import Joined


@dataclass(frozen=True)
class LoadJob:
    """Load blocks of a context, from an entry and its parts, into blocks of the pool.

    Attributes:
        request_id: the request that waits for the load.
        key: key of the entry.
        blocks: the blocks to fill, for each cache group.
        tokens: number of tokens that the engine expects to be loaded.
        fingerprint: fingerprint that the entry must have.
        digest: the entry's digest when its token ids were compared; an entry with another digest is refused.
            None accepts any entry under this key.
        tag: `TransferParams.tag` of the request.
        joined: what is moved from other entries behind these blocks; None: nothing.
        table: all blocks of the context, in order, if anything is moved.
    """

    request_id: str
    key: str
    blocks: tuple[GroupBlocks, ...]
    tokens: int
    fingerprint: str
    digest: str | None = None
    tag: str | None = None
    joined: Joined | None = None
    table: tuple[int, ...] = ()


@dataclass(frozen=True)
class SaveJob:
    """Save a finished request's blocks, which the engine holds until the save is reported.

    Attributes:
        request_id: the finished request.
        key: key of the entry to write.
        tokens: every token id of the context.
        computed: number of tokens, from the first, that have KV.
        blocks: the request's blocks, for each cache group: all of them, or those within the window.
        fingerprint: fingerprint of the model and its KV.
        draft: name of the draft that several ranks write together.
        images: the images in the context, in order.
        parts: the entries that hold the first blocks of the context already, which are not written again.
        source: key of the entry that the context continues, which holds all of `parts`; empty without.
        tag: `TransferParams.tag` of the request.
    """

    request_id: str
    key: str
    tokens: tuple[int, ...]
    computed: int
    blocks: tuple[GroupBlocks, ...]
    fingerprint: str
    draft: str
    images: tuple[ImageRef, ...] = ()
    parts: tuple[Part, ...] = ()
    source: str = ""
    tag: str | None = None


@dataclass(frozen=True)
class PlacedMixture:
    """The mixture that is the input of one token of the next forward pass.

    Attributes:
        slot: the token's slot in the KV cache.
        mixture: the mixture.
    """

    slot: int
    mixture: Mixture


@dataclass
class StepJobs:
    """The jobs of one engine step.

    Attributes:
        loads: loads to begin.
        saves: saves to begin.
        given_up: requests that ended during their load, which need not be finished.
        mixtures: mixtures for requests that were given their blocks.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    mixtures: list[PlacedMixture] = field(default_factory=list)

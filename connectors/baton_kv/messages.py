"""Define the jobs that the scheduler role sends to the worker role with each engine step. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton_kv.blocks import GroupBlocks
from baton_kv.contract import Mixture
from baton_kv.format import ImageRef, Part


@dataclass(frozen=True)
class Move:
    """Tokens of an entry whose KV is loaded to another place of a context.

    Attributes:
        key: key of the entry.
        digest: its digest when its token ids were compared, hexadecimal.
        fingerprint: its fingerprint.
        start: index of the first token in the entry's context.
        tokens: number of tokens.
        to: index of the first token in the context that is loaded.
    """

    key: str
    digest: str
    fingerprint: str
    start: int
    tokens: int
    to: int

    @property
    def stop(self) -> int:
        """Return the index after the last token, in the context that is loaded."""
        return self.to + self.tokens

    def after(self, tokens: int) -> Move:
        """Return the part of this move behind the first `tokens` tokens of the context; it may be empty."""
        skipped = min(max(0, tokens - self.to), self.tokens)
        return replace(self, start=self.start + skipped, tokens=self.tokens - skipped, to=self.to + skipped)


@dataclass(frozen=True)
class Gap:
    """Tokens between moved ones, which are computed before the request runs.

    Attributes:
        start: index of the first token in the context.
        tokens: their token ids.
    """

    start: int
    tokens: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Return the index after the last token."""
        return self.start + len(self.tokens)

    def after(self, tokens: int) -> Gap:
        """Return the part of this gap behind the first `tokens` tokens of the context; it may be empty."""
        skipped = min(max(0, tokens - self.start), len(self.tokens))
        return Gap(self.start + skipped, self.tokens[skipped:])


@dataclass(frozen=True)
class Joined:
    """The parts that are moved into a context behind its first one.

    Attributes:
        begin: number of tokens before it, whose KV is loaded where it was.
        moves: what is moved, in order.
        gaps: what is computed between it, in order.
    """

    begin: int
    moves: tuple[Move, ...] = ()
    gaps: tuple[Gap, ...] = ()

    @property
    def stop(self) -> int:
        """Return the number of tokens of the context that have KV then."""
        return self.moves[-1].stop if self.moves else self.begin

    @property
    def tokens(self) -> int:
        """Return the number of tokens that are moved or computed, which follow one another up to `stop`."""
        return sum(move.tokens for move in self.moves) + sum(len(gap.tokens) for gap in self.gaps)

    def after(self, tokens: int) -> Joined:
        """Return the part of it behind the first `tokens` tokens, which the engine has."""
        moves = tuple(move for each in self.moves if (move := each.after(tokens)).tokens)
        gaps = tuple(gap for each in self.gaps if (gap := each.after(tokens)).tokens)
        return Joined(self.begin, moves, gaps)


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
        blocks: the request's blocks, for each cache group: all of them, those within the window, or states.
        fingerprint: fingerprint of the model and its KV.
        draft: name of the draft that several ranks write together.
        images: the images in the context, in order.
        parts: the entries that hold the first blocks of the context already, which are not written again.
        source: key of the entry that the context continues, which holds all of `parts`; empty without.
        states: number of tokens after which each of the running states is that are written, see
            `EntryDescription.states`.
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
    states: tuple[int, ...] = ()
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

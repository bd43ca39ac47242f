"""Describe what is moved from other entries into a context, and what is computed between. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    """What is moved into a context behind its first part.

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
        """Return what is left of it behind the first `tokens` tokens, which the engine has."""
        moves = tuple(move for each in self.moves if (move := each.after(tokens)).tokens)
        gaps = tuple(gap for each in self.gaps if (gap := each.after(tokens)).tokens)
        return Joined(self.begin, moves, gaps)

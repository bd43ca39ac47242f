"""Find, among a tenant's contexts, the one that shares the longest prefix with a prompt.

Contexts are indexed by a chain of hashes, one for each whole block of token ids: the hash of a block covers
all tokens before it. A lookup stops at the first block that no context has, so that one that finds nothing
costs one hash. Behind the last block that a context shares with the prompt, tokens are compared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from baton.library.handoff import BLOCK, Handoff, PrefixMatch, common_tokens

COMPARED = 4
"""Most contexts that are compared token by token behind the last block that they share with the prompt."""
Digest = bytes
Contexts = dict[str, Handoff]
"""Contexts by the ids of their handoffs, the oldest first."""
Scope = tuple[str, str]
"""A tenant, and the fingerprint of the weights: contexts of other tenants and weights are never looked at."""


@dataclass
class ScopeIndex:
    """The contexts of one tenant and one model.

    Attributes:
        blocks: the contexts that have a block, by its hash.
        ends: the contexts whose last whole block it is.
    """

    blocks: dict[Digest, Contexts] = field(default_factory=dict)
    ends: dict[Digest, Contexts] = field(default_factory=dict)


class PrefixIndex:
    """Contexts by the hashes of their blocks."""

    def __init__(self) -> None:
        self._scopes: dict[Scope, ScopeIndex] = {}
        self._chains: dict[str, list[Digest]] = {}

    def __contains__(self, record: Handoff) -> bool:
        return record.id in self._chains

    def add(self, record: Handoff) -> None:
        """Add a context. One shorter than a block is never found."""
        chain = list(_chain(record.distinct_tokens)) if record not in self else []
        if not chain:
            return
        self._chains[record.id] = chain
        scope = self._scopes.setdefault(_scope(record), ScopeIndex())
        for digest in chain:
            scope.blocks.setdefault(digest, {})[record.id] = record
        scope.ends.setdefault(chain[-1], {})[record.id] = record

    def remove(self, record: Handoff) -> None:
        """Remove a context, if it is there."""
        chain = self._chains.pop(record.id, None)
        if chain is None:
            return
        scope = self._scopes[_scope(record)]
        for digest in chain:
            _take_out(scope.blocks, digest, record)
        _take_out(scope.ends, chain[-1], record)
        if not scope.blocks:
            del self._scopes[_scope(record)]

    def find(
        self, tenant: str, weights: str, prompt: Sequence[int], usable: Callable[[Handoff], bool]
    ) -> PrefixMatch | None:
        """Return the context that shares most tokens with a prompt; of equal ones the newest.

        Args:
            weights: fingerprint of the weights that their KV was computed with.
            prompt: token ids, in which other images are other numbers; see `with_distinct_images`.
            usable: returns whether a context may be found; asked once of each.

        Returns:
            None: no context shares a whole block.

        Raises:
            OverflowError: a token id does not fit into 32 bits.
        """
        scope, along = self._scopes.get((tenant, weights)), list[Contexts]()
        for digest in _chain(prompt) if scope is not None else ():
            if scope is None or (contexts := scope.blocks.get(digest)) is None:
                break
            along.append(contexts)
        answers = dict[str, bool]()

        def fits(record: Handoff) -> bool:
            if record.id not in answers:
                answers[record.id] = usable(record)
            return answers[record.id]

        for blocks in range(len(along), 0, -1):
            contexts = along[blocks - 1]
            newest = list(islice(filter(fits, reversed(contexts.values())), COMPARED))
            if not newest:
                continue
            begin = (blocks - 1) * BLOCK
            common = [common_tokens(record.distinct_tokens, prompt, begin) for record in newest]
            best = max(range(len(newest)), key=common.__getitem__)
            found = newest[best]
            alone = all(each is found or _is_one(found, each, begin) for each in contexts.values())
            return PrefixMatch(found, common[best], alone)
        return None

    def continued_by(self, record: Handoff) -> list[Handoff]:
        """Return the contexts that are a whole prefix of an indexed one, and are shorter."""
        scope, found = self._scopes.get(_scope(record)), list[Handoff]()
        tokens = record.distinct_tokens
        for number, digest in enumerate(self._chains.get(record.id, ())):
            for each in (scope.ends.get(digest) or {}).values() if scope is not None else ():
                theirs = each.distinct_tokens
                shorter = len(theirs) < len(tokens)
                if shorter and common_tokens(theirs, tokens, number * BLOCK) == len(theirs):
                    found.append(each)
        return found

    def continuing(self, record: Handoff) -> Iterator[Handoff]:
        """Yield the contexts that begin with all of an indexed one, and are longer."""
        scope, chain = self._scopes.get(_scope(record)), self._chains.get(record.id)
        if scope is None or chain is None:
            return
        tokens, begin = record.distinct_tokens, (len(chain) - 1) * BLOCK
        for each in scope.blocks[chain[-1]].values():
            longer = len(each.tokens) > len(tokens)
            if longer and common_tokens(each.distinct_tokens, tokens, begin) == len(tokens):
                yield each


def _is_one(record: Handoff, other: Handoff, begin: int) -> bool:
    """Return whether one of two contexts, equal up to `begin`, continues the other."""
    shorter = min(len(record.tokens), len(other.tokens))
    return common_tokens(record.distinct_tokens, other.distinct_tokens, begin) == shorter


def _take_out(contexts: dict[Digest, Contexts], digest: Digest, record: Handoff) -> None:
    contexts[digest].pop(record.id, None)
    if not contexts[digest]:
        del contexts[digest]


def _scope(record: Handoff) -> Scope:
    return record.tenant, record.weights


def _chain(tokens: Sequence[int]) -> Iterator[Digest]:
    """Yield the hash of each whole block of token ids, each over all tokens up to its end."""
    digest = b""
    for stop in range(BLOCK, len(tokens) + 1, BLOCK):
        block = array("i", tokens[stop - BLOCK : stop])
        digest = hashlib.blake2b(digest + block.tobytes(), digest_size=16).digest()
        yield digest

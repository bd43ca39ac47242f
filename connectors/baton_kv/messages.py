"""What the two roles of the connector tell each other, one step of the engine at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_kv.entry import ImageSpan


@dataclass(frozen=True)
class LoadJob:
    """Scheduler to worker: bring an entry's blocks into these blocks of the pool.

    Attributes:
        request_id: who waits for it.
        key: the entry.
        first_block: which of the entry's blocks goes into the first of `block_ids`.
        block_ids: blocks of the pool, in the order of the context.
        tokens: how many tokens the engine counts on.
        seal: the entry's digest when its token ids were compared: another entry in its place is refused.
            None: they were not compared, whatever lies there is wanted.
        tag: what the request's asker calls it.
    """

    request_id: str
    key: str
    first_block: int
    block_ids: tuple[int, ...]
    tokens: int
    seal: str | None = None
    tag: str | None = None


@dataclass(frozen=True)
class SaveJob:
    """Scheduler to worker: a finished request's blocks, held until they are saved.

    Attributes:
        request_id: whose they are.
        key: the entry to make.
        tokens: every token id of its context.
        computed: for how many of them there is KV.
        block_ids: its blocks of the pool, in the order of the context.
        images: the images its token ids stand for, in order.
        tag: what the request's asker calls it.
    """

    request_id: str
    key: str
    tokens: tuple[int, ...]
    computed: int
    block_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()
    tag: str | None = None


@dataclass
class StepJobs:
    """Scheduler to worker: what one step brings."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    """Requests that ended while their load was under way: there is no need to go on with it."""

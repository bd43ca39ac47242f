"""Describe what an engine loads and saves beside a request, what it reports, and who chooses it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.images.image_position import ImagePosition, with_distinct_images
from baton.images.placed_image import PlacedImage
from baton_kv.contract import Mixture, MovedPart, TransferFailure


@dataclass(eq=False)
class TransferReport:
    """What happened to a request with a handoff. Only the engine writes it.

    Attributes:
        prompt_ids: the prompt's token ids, once known.
        output_ids: the token ids generated so far.
        answer_ids: the answer's token ids as its client received it: those that the engine generated, without
            what stopped it; None: no token ids say what the client received. Of a request that saves its
            answer alone.
        images: where images stand in the prompt, once known.
        cached: number of prompt tokens that the engine did not prefill.
        loaded: number of tokens that a load brought, with those moved and those computed between them; None:
            nothing was loaded. Of several, after a preemption or for several answers, the one that moved and
            brought most.
        moved: number of these tokens whose KV was moved from another place.
        computed: number of these tokens that were computed between moved ones.
        lost_entries: the entries named in the request that could not be used, and why.
        lost: number of tokens whose KV is in the entry but could not be loaded.
        load_ms: milliseconds that the load took.
        saves: False once the engine has reported that it saves nothing.
        miss: why the entry could not be used; None: it could, or there was none.
        first_token: raw log probabilities of the likeliest tokens at the first place of the answer, by token
            id; empty unless the request is audited.
        save_over: set when the engine has reported the save's outcome, good or bad.
    """

    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    answer_ids: list[int] | None = None
    images: Sequence[ImagePosition] = ()
    cached: int = 0
    loaded: int | None = None
    moved: int = 0
    computed: int = 0
    lost_entries: dict[str, TransferFailure] = field(default_factory=dict)
    lost: int = 0
    load_ms: float = 0.0
    saves: bool = True
    miss: TransferFailure | None = None
    first_token: dict[int, float] = field(default_factory=dict)
    save_over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def distinct_prompt(self) -> Sequence[int]:
        """The prompt's token ids, in which other images are other numbers; see `with_distinct_images`."""
        return with_distinct_images(self.prompt_ids, self.images)

    @property
    def in_place(self) -> int:
        """Number of tokens whose KV was loaded from the entry to the place that it was computed at."""
        return (self.loaded or 0) - self.moved - self.computed


@dataclass(frozen=True, eq=False)
class TransferRequest:
    """A transfer that an engine is asked for beside a request's body: its prompt, KV to load and to save.

    Attributes:
        prompt: token ids of the whole prompt, in place of the body's; None: the body's prompt is used.
        images: the images that the prompt holds, in order.
        save: key of the entry to save the KV as; None: nothing is saved.
        prompt_only: whether to save the prompt's KV without the answer's.
        load: key of the entry to load KV from; None: nothing is loaded.
        limit: most tokens to load; None: all.
        moved: KV of other entries that follows those tokens, each moved to its place.
        salt: sets the engine's prefix cache apart for this request alone; None: that of its tenant is used.
        least: fewest tokens to save beyond those that `load` holds; with fewer, nothing is saved.
        latent_steps: number of latent-step placeholders in the prompt.
        mixture: input of the prompt's first position, which is one of these placeholders; None: none is.
        audited: whether the report needs `first_token`.
        computed: whether all of the prompt is computed, without the engine's prefix cache.
        report: filled in by the engine with what happened.
    """

    prompt: list[int] | None = None
    images: Sequence[PlacedImage] = ()
    save: str | None = None
    prompt_only: bool = False
    load: str | None = None
    limit: int | None = None
    moved: Sequence[MovedPart] = ()
    salt: str | None = None
    least: int = 0
    latent_steps: int = 0
    mixture: Mixture | None = None
    audited: bool = False
    computed: bool = False
    report: TransferReport = field(default_factory=TransferReport)

    @property
    def moves_kv(self) -> bool:
        """Whether the connector has a part in the request; otherwise it only replaces the body's prompt."""
        return self.save is not None or self.load is not None or self.mixture is not None

    @property
    def saves_answer(self) -> bool:
        """Whether the answer is saved behind its prompt."""
        return self.save is not None and not self.prompt_only


class TransferChooser(Protocol):
    """Chooses a transfer for each prompt of one request, when its token ids are known."""

    def choose(
        self, prompt: Sequence[int], images: Sequence[ImagePosition] = (), *, loads: bool, saves: bool
    ) -> TransferRequest | None:
        """Return what to load and save beside a prompt; None: nothing.

        Args:
            prompt: token ids of the whole prompt.
            images: the images that it holds, in order; it holds nothing else.
            loads: whether the engine may start from loaded KV for it.
            saves: whether the engine may save it: its KV is that of one answer.
        """
        ...

    def ended(self, transfer: TransferRequest) -> None:
        """Note that the answer is complete, and with it the transfer's report."""
        ...

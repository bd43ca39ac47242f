"""What is moved of joined handoffs: the end of each context that the prompt holds, never its beginning alone."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.engines.fake.engine import FakeEngine
from baton.engines.transfers import TransferReport, TransferRequest, TransferWatch
from baton.errors import OperationUnsupported
from baton.library.handoff import Handoff, HandoffState, StoredImage
from baton.library.index import HandoffIndex
from baton.relay.join import Part
from baton.relay.move import HEAD_TOKENS, LONE_HEAD_TOKENS, moved_parts, require_movable
from baton.relay.plan import salt_of
from baton.relay.prompt.chat import ContextPrompt
from baton.relay.run import JoinedPart, PlannedRequest
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import TransferMetrics
from baton_kv.contract import MovedPart, Transfer, TransferFailure, TransferOutcome
from baton_kv.format import ImageRef

SHARED = list(range(100, 120))


def part(tokens: Sequence[int], size: int = 1) -> Part:
    record = Handoff(
        tenant="local", model="a", weights="w", created_at=0, ttl_s=60, expires_at=60,
        tokens=array("i", tokens), bytes=size,
    )  # fmt: skip
    return Part(record, "from")


def moved(tokens: Sequence[int], parts: Sequence[Part], *ends: int) -> list[tuple[int, int, int] | None]:
    """What is moved of each part: from where in its context, how many tokens, to where."""
    found = moved_parts(tokens, parts, ends)
    return [None if each is None else (each.start, each.tokens, each.to) for each in found]


def test_all_but_the_first_tokens_and_the_last_one_are_moved() -> None:
    """The first, because all others attend to them; the last was sampled, and has no KV yet."""
    parts = [part([*SHARED, 1, 2, 3]), part([*SHARED, *range(40)]), part([*SHARED, *range(40)])]
    prompt = [*SHARED, 1, 2, 3, *range(40), *range(40), 7]
    assert moved(prompt, parts, 23, 63, 103) == [
        None,
        (20 + HEAD_TOKENS, 39 - HEAD_TOKENS, 23 + HEAD_TOKENS),
        (20 + HEAD_TOKENS, 39 - HEAD_TOKENS, 63 + HEAD_TOKENS),
    ]


@pytest.mark.parametrize("shared", [0, 1, HEAD_TOKENS - 1])
def test_more_is_computed_of_a_part_that_shares_no_beginning(shared: int) -> None:
    size = LONE_HEAD_TOKENS + 20
    parts = [part(range(50, 60)), part([*range(100, 100 + shared), *range(size)])]
    prompt = [*range(50, 60), *range(size), 7]
    expected = (shared + LONE_HEAD_TOKENS, 19, 10 + LONE_HEAD_TOKENS)
    assert moved(prompt, parts, 10, 10 + size) == [None, expected]
    short = part(range(LONE_HEAD_TOKENS))
    assert moved([1, *range(LONE_HEAD_TOKENS), 7], [part([1]), short], 1, 1 + LONE_HEAD_TOKENS) == [
        None,
        None,
    ]


def test_of_an_image_all_tokens_are_moved() -> None:
    """The engine computes no image between moved tokens."""
    whole = part(range(40))
    whole.record.positions.extend([ImageRef("a" * 64, 5, 4), ImageRef("b" * 64, 20, 4)])
    parts = [part([1, 2, 3]), whole]
    assert moved([1, 2, 3, *range(40), 7], parts, 3, 43) == [None, (5, 34, 8)]


def test_what_a_template_writes_between_chats_is_computed() -> None:
    """The segment ends as the part's context does, and begins otherwise."""
    parts = [part([*SHARED, 1]), part([*SHARED, *range(50, 80)])]
    prompt = [*SHARED, 1, 88, 89, *range(50, 80), 7]
    assert moved(prompt, parts, 21, 53) == [None, (20 + HEAD_TOKENS, 29 - HEAD_TOKENS, 23 + HEAD_TOKENS)]


def test_what_the_prompt_does_not_hold_or_nobody_stored_is_not_moved() -> None:
    first = part([*SHARED, 1])
    prompt = [*SHARED, 1, 50, 51, 52, 7]
    assert moved(prompt, [first, part([*SHARED, 50, 51, 99])], 21, 24) == [None, None]
    assert moved(prompt, [first, part([*SHARED, 50, 51, 52], size=0)], 21, 24) == [None, None]
    assert moved(prompt, [first, part([*SHARED, 50])], 21, 21) == [None, None], "it is within another one"
    assert moved([1, 2, 3, 4], [part([1]), part([2, 3])], 1, 3) == [None, None], "all of it is its beginning"


def test_only_what_the_engine_would_compute_shares_its_prefix_cache() -> None:
    first, second = part([*SHARED, 1]), part([*SHARED, *range(30)])
    (_, one) = moved_parts([*SHARED, 1, *range(30), 7], [first, second], [21, 51])
    assert one is not None
    assert salt_of(None, []) is None
    assert salt_of(first.record, []) is None
    inexact = first.record.model_copy(update={"exact": False})
    salts = {salt_of(first.record, [one]), salt_of(first.record, [one]), salt_of(inexact, [])}
    assert None not in salts
    assert len(salts) == 3, "also two requests with the same parts have one each"


def test_an_engine_that_cannot_move_says_why() -> None:
    require_movable(FakeEngine("a"), "handoff.join")
    with pytest.raises(OperationUnsupported, match="sliding windows") as refused:
        require_movable(FakeEngine("a", moves_unsupported="it has sliding windows"), "handoff.join")
    assert refused.value.param == "handoff.join"


def session(source: Handoff, report: TransferReport) -> PlannedRequest:
    nobody: Any = None
    transfer = TransferRequest(report=report, salt="its own")
    prompt, engine = ContextPrompt(), FakeEngine("a")
    return PlannedRequest(
        nobody, nobody, nobody, engine, RequestContext("r"), prompt, transfer, source, None, None
    )


@pytest.mark.parametrize(
    ("inexact", "outcomes", "exact"),
    [
        (False, [{"tokens": 90, "moved": 40}], False),
        (False, [{"tokens": 90}], True),
        (False, [{"tokens": 90, "moved": 40, "failure": TransferFailure.CORRUPT}], True),
        # Tokens were said from moved KV before the request was preempted and its second load failed.
        (False, [{"tokens": 90, "moved": 40}, {"tokens": 90, "failure": TransferFailure.CORRUPT}], False),
        (False, [{"tokens": 90, "moved": 40}, {"tokens": 50}], False),
        (True, [{"tokens": 90}], False),
        (True, [{"tokens": 90}, {"tokens": 90, "failure": TransferFailure.MISSING}], False),
        (True, [{"tokens": 90, "failure": TransferFailure.MISSING}], True),
        (True, [], True),
    ],
)
def test_an_answer_is_exact_unless_any_of_its_loads_brought_moved_kv(
    inexact: bool, outcomes: list[dict[str, Any]], exact: bool
) -> None:
    """Whatever the engine says it found in its cache: that is the request's own."""
    engine = FakeEngine("a")
    watch = TransferWatch(engine.throughput, TransferMetrics(CollectorRegistry(), "a"))
    source = part([1, 2]).record.model_copy(update={"exact": not inexact})
    tried = session(source, TransferReport(cached=90))
    watch.add("tag", tried.transfer)
    watch.transferred([TransferOutcome("r", "k", Transfer.LOAD, "tag", **each) for each in outcomes])
    assert tried.exact is exact
    assert tried.transfer.report.in_place >= 0
    assert all(part["recomputed_tokens"] >= 0 for part in tried._parts())


def test_what_is_told_is_of_one_load_the_one_that_moved_most() -> None:
    """A preempted request, or one with several answers, loads more than once, and less at times."""
    engine = FakeEngine("a")
    watch = TransferWatch(engine.throughput, TransferMetrics(CollectorRegistry(), "a"))
    tried = session(part([1, 2]).record, TransferReport(cached=90))
    watch.add("tag", tried.transfer)
    loads = [(90, 40, 16), (60, 10, 16), (95, 40, 20), (99, 0, 0)]
    for tokens, moved_tokens, computed in loads:
        load = TransferOutcome("r", "k", Transfer.LOAD, "tag", tokens=tokens, moved=moved_tokens)
        watch.transferred([replace(load, computed=computed)])
    report = tried.transfer.report
    assert (report.loaded, report.moved, report.computed, report.in_place) == (95, 40, 20, 35)


def test_each_part_is_told_by_what_was_loaded_or_moved_of_it() -> None:
    """One between them of which nothing was moved was computed, whatever was loaded behind it."""
    report = TransferReport(loaded=100, moved=30, computed=40, prompt_ids=list(range(110)))
    first, gap, last = part(range(30)), part(range(30, 60)), part(range(60, 101))
    moved_part = MovedPart(key="scope/" + "k" * 16, start=10, tokens=30, to=70)
    tried = replace(
        session(first.record, report),
        parts=(JoinedPart(first, 30), JoinedPart(gap, 60), JoinedPart(last, 101, moved_part)),
    )
    told = [
        (part["loaded_tokens"], part["moved_tokens"], part["recomputed_tokens"]) for part in tried._parts()
    ]
    assert told == [(30, 0, 0), (0, 0, 30), (0, 30, 11)]


@pytest.mark.parametrize("target", [[], [1]])
def test_images_that_a_model_takes_at_the_beginning_alone_come_first(target: list[int]) -> None:
    image = StoredImage(
        digest="a" * 64, media_type="image/png", width=1, height=1, bytes=1, offset=0, length=1, target=target
    )
    shows = part([1, 2])
    shows.record.images.append(image)
    assert shows.must_be_first is not bool(target)


@pytest.mark.parametrize(("exact", "steps", "found"), [(True, 0, True), (False, 0, False), (True, 3, False)])
def test_prompts_find_only_kv_that_the_engine_would_compute_of_them(
    exact: bool, steps: int, found: bool
) -> None:
    index, tokens = HandoffIndex(time.monotonic), list(range(200))
    told = {"state": HandoffState.READY, "exact": exact, "latent_steps": steps}
    record = part(tokens).record.model_copy(update=told)
    index.add(record, 60)
    index.publish(record)
    match = index.prefixes.find("local", "w", [*tokens, 1], lambda _: True)
    assert (match is not None) is found

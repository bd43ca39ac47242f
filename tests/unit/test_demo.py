"""The demo counts what it says it counts, reads what a gateway prints, and ends in a table or a reason."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.gateways import run_fake

from baton.config.groups import EngineSettings
from baton.config.settings import load_settings
from baton.engines.fake.engine import FakeEngine
from baton.errors import OperatorError
from baton.serve import welcome
from baton.telemetry.progress import PhaseProgress
from examples.demo.agents import AGENTS, EDITOR, NATURALIST, READER, Way, ways_of_our_own
from examples.demo.client import Answer, reason_of
from examples.demo.display import LineStage, PanelStage
from examples.demo.figures import Result, notes, reference_of, rows, sameness, table
from examples.demo.gateway import ARRIVED, PHASE, READY, Follower, _config, _last_words
from examples.demo.run import run
from examples.demo.ships_log import DAYS, EVENTS, FEW_DAYS, ships_log

RELAYED = Way("handoff", "handed on", "a", "b", relays=True)
PLAIN = Way("text, cold", "sent again", "b", "b")
OTHER_COPY = Way("text, other", "sent again", "b", "b", copy="2")


def answer(agent: str, *, cached: int = 0, first: float = 1.0, said: int = 7, **more: Any) -> Answer:
    known = {"prompt_ids": [1, 2, 3], "token_ids": [said], "prompt_tokens": 100} | more
    return Answer(agent, cached_tokens=cached, first_token_s=first, **known)


def result(way: Way = PLAIN, wall_s: float = 9.0, **changed: Answer) -> Result:
    answers = [changed.get(agent.name) or answer(agent.name) for agent in AGENTS]
    return Result(way, answers, wall_s)


def test_prefilled_is_what_was_not_there_yet() -> None:
    found = result(editor=answer("editor", cached=90), navigator=answer("navigator", cached=100))
    assert (found.prompt_tokens, found.prefilled_tokens) == (500, 310)


def test_the_median_leaves_out_who_got_no_token() -> None:
    silent = answer("reader")
    silent.first_token_s = None
    found = result(
        reader=silent, editor=answer("editor", first=3.0), navigator=answer("navigator", first=2.0)
    )
    assert found.median_first_token_s == 1.5
    assert (found.first_token_s("reader"), found.first_token_s("editor")) == (None, 3.0)


def test_answers_are_the_same_only_token_by_token_after_the_same_prompt() -> None:
    reference = result()
    assert sameness(reference, reference) == "-"
    assert sameness(result(RELAYED), reference) == "5 of 5"
    assert sameness(result(RELAYED, editor=answer("editor", said=8)), reference) == "4 of 5"
    other_prompt = answer("editor", prompt_ids=[1, 2])
    assert sameness(result(RELAYED, editor=other_prompt), reference) == "4 of 5 (1 other prompts)"
    assert sameness(result(OTHER_COPY), reference) == "-"


def test_nothing_is_called_the_same_without_token_ids() -> None:
    silent = {agent.name: answer(agent.name, prompt_ids=[], token_ids=[]) for agent in AGENTS}
    assert sameness(result(RELAYED, **silent), result(**silent)) == "no token ids"


def test_answers_are_held_against_the_same_copy_passed_as_text() -> None:
    results = [result(RELAYED), result(OTHER_COPY), result(PLAIN)]
    assert reference_of(results) is results[2]


def test_the_table_has_a_column_for_each_way() -> None:
    relayed = result(
        RELAYED,
        2.5,
        reader=answer("reader"),
        editor=answer("editor", cached=99, first=0.25, outcome="loaded"),
    )
    results = [relayed, result(PLAIN)]
    found = {name: figures for name, *figures in rows(results)}
    assert found["prefilled tokens"] == ["401", "500"]
    assert found["first token: editor"] == ["0.25 s", "1.00 s"]
    assert found["wall time"] == ["2.50 s", "9.00 s"]
    assert found["same tokens"] == ["5 of 5", "-"]
    assert [column.header for column in table(results).columns] == ["", "handoff", "text, cold"]
    assert "Contexts taken from a handoff: 1 loaded." in notes(results)


def test_an_answer_is_put_together_from_its_chunks() -> None:
    found = Answer("reader")
    choice = {"delta": {"content": "An"}, "token_ids": [4]}
    said = [
        found.take(
            {"choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]}
        ),
        found.take({"choices": [choice]}),
        found.take({"choices": [{"delta": {"content": " owl"}, "token_ids": [5, 6]}]}),
    ]
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
    found.take({"choices": [], "usage": usage})
    found.take({"choices": [], "handoff": {"id": "h", "source": {"outcome": "resident"}}})
    assert (said, found.text) == (["", "An", " owl"], "An owl")
    assert (found.prompt_ids, found.token_ids, found.prefilled_tokens) == ([1, 2], [4, 5, 6], 2)
    assert (found.handoff, found.outcome) == ("h", "resident")


def test_usage_without_details_counts_all_as_prefilled() -> None:
    found = Answer("reader")
    found.take({"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": None}})
    assert found.prefilled_tokens == 9


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"error": "x"}'])
def test_an_error_without_a_reason_still_ends_in_a_line(body: bytes) -> None:
    assert "without a reason" in reason_of(body)


def test_the_log_is_the_same_every_time_and_has_every_fact_once() -> None:
    text = ships_log()
    assert text == ships_log()
    assert max(EVENTS) <= DAYS
    assert all(text.count(event) == 1 for event in EVENTS.values())
    assert len(set(text.splitlines())) == len(text.splitlines())
    assert ships_log(FEW_DAYS, "17").startswith("Copy 17. ")


def test_what_a_starting_gateway_prints_is_understood() -> None:
    screen = io.StringIO()
    with PhaseProgress(screen) as progress:
        progress.phase("engine reader", "loading: the weights")
        progress.done("engine reader")
    first, last = (PHASE.fullmatch(line) for line in screen.getvalue().split("\n") if line)
    assert first is not None
    assert last is not None
    assert (first["name"], first["text"]) == ("engine reader", "loading: the weights")
    assert last["text"] in ARRIVED
    url = "http://127.0.0.1:4711"
    engines = [EngineSettings(name=name, model="smollm2") for name in ("reader", "others")]
    found = READY.search(welcome(url, url, engines, keyed=True))
    assert found is not None
    assert found[1] == url


async def test_the_demo_reads_where_its_gateway_and_the_metrics_are() -> None:
    """From what a gateway with keys prints; its metrics have a port of their own."""
    url, metrics = "http://127.0.0.1:4711", "http://127.0.0.1:4712"
    printed = welcome(url, metrics, [EngineSettings(name="reader", model="smollm2")], keyed=True)
    with PhaseProgress(io.StringIO()) as progress:
        follower = Follower(progress)
        for line in printed.splitlines():
            follower._read(line)
        found = await asyncio.wait_for(follower.ready(), 20)
    assert found == (url, f"{metrics}/metrics")


def test_the_reason_why_a_gateway_ended_is_one_line() -> None:
    told = ["[ 0.1s] vllm: importing", "baton: engines: the name", "'a' is given twice"]
    assert _last_words(told) == "The gateway did not start: engines: the name 'a' is given twice"
    assert "no reason" in _last_words(["Traceback"])


def test_the_demos_settings_are_settings(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text(_config(load_settings(), tmp_path / 'a "quoted" folder'))
    settings = load_settings(path)
    reader, others = settings.engines
    assert (reader.handoff, others.handoff) == (True, True)
    assert (reader.args["enable_prefix_caching"], others.args["enable_prefix_caching"]) == (True, False)
    ways = ways_of_our_own(reader.name, others.name, {"handoff": "k1", "text": "k2"})
    assert {way.engine_of(agent) for way in ways for agent in AGENTS} == {"reader", "others"}
    assert ways[0].key != ways[2].key


@pytest.mark.parametrize("stage", [LineStage, PanelStage])
def test_every_answer_is_shown(stage: type[LineStage] | type[PanelStage]) -> None:
    screen = io.StringIO()
    shown = stage(Console(file=screen, force_terminal=stage is PanelStage, width=90))
    with shown.showing(RELAYED):
        shown.reads(READER)
        for agent in AGENTS:
            shown.reads(agent)
            said = answer(agent.name, cached=60)
            said.text = f"I am the {agent.name}."
            shown.says(agent, said.text)
            shown.ends(agent, said)
    for agent in AGENTS:
        assert f"I am the {agent.name}." in screen.getvalue()
    assert "prefilled 40 of 100" in screen.getvalue()


def test_the_agents_relay_and_pass_text(capsys: pytest.CaptureFixture[str]) -> None:
    with run_fake(FakeEngine("a", supports_handoffs=True)) as gateway:
        run(gateway.url, None, "", quick=True)
        bodies = [body for body in gateway.engine("a").bodies if body.get("stream")]
    shown = capsys.readouterr().out
    assert len(bodies) == 3 * len(AGENTS)
    assert "same tokens" in shown
    assert "Contexts taken from a handoff: 4 recomputed." in shown
    relayed, passed = bodies[: len(AGENTS)], bodies[-len(AGENTS) :]
    assert [len(body["messages"]) for body in relayed] == [2, 1, 1, 1, 1]
    assert [len(body["messages"]) for body in passed] == [2, 4, 4, 4, 6]
    assert passed[-1]["messages"][-1]["content"] == EDITOR.question
    assert passed[-1]["messages"][3]["content"] == NATURALIST.question


@pytest.mark.parametrize(
    ("url", "model", "reason"),
    [
        ("nonsense", None, "no address of a gateway"),
        ("http://127.0.0.1:9", None, "No answer from"),
        (None, "smollm2", "--url"),
    ],
)
def test_what_cannot_be_shown_ends_in_a_line(url: str | None, model: str | None, reason: str) -> None:
    with pytest.raises(OperatorError, match=reason):
        run(url, model, "", quick=True)


@pytest.mark.parametrize(("model", "reason"), [("b", "no model 'b'"), (None, "does not support handoffs")])
def test_what_a_gateway_refuses_is_the_reason(model: str | None, reason: str) -> None:
    with run_fake(FakeEngine("a")) as gateway, pytest.raises(OperatorError, match=reason) as error:
        run(gateway.url, model, "", quick=True)
    assert "\n" not in error.value.message

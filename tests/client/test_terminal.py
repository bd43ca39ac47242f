"""`baton chat`: a conversation in the terminal, which sends what is new, streams, forks, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.gateways import FakeGateway, run_fake
from typer.testing import CliRunner

from baton import cli
from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.errors import GenerationFailed, OperatorError
from baton_client import Baton, NotFound
from baton_client.terminal import talk


class Screen:
    """What a person types, and what is shown.

    Args:
        lines: typed one after the other; an exception is raised in place of a line.
    """

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines = list(lines)
        self.prompts: list[str] = []
        self.shown: list[str] = []

    def read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    def write(self, text: str) -> None:
        self.shown.append(text)

    @property
    def text(self) -> str:
        return "".join(self.shown)


def chat(gateway: FakeGateway, *lines: str | BaseException, **options: Any) -> Screen:
    screen = Screen(*lines)
    talk(gateway.url, read=screen.read, write=screen.write, **({"max_tokens": 3} | options))
    return screen


def messages(gateway: FakeGateway, name: str) -> list[list[str]]:
    """The messages of each chat that an engine was asked for."""
    return [
        [said["content"] for said in body["messages"]]
        for body in gateway.engine(name).bodies
        if "messages" in body
    ]


def test_each_turn_sends_the_new_message_and_the_end_deletes_what_was_saved(
    gateway: FakeGateway, baton: Baton
) -> None:
    screen = chat(gateway, "one two", "", "three", "/quit", "never", system="be brief")
    assert messages(gateway, "a") == [["be brief", "one two"], ["three"]]
    assert screen.text.startswith("a. /help ")
    assert len([piece for piece in screen.shown if piece.endswith("\n")]) == 3
    assert list(baton.handoffs.list()) == []
    assert {body.get("max_tokens") for body in gateway.engine("a").bodies if "messages" in body} == {3}


def test_the_text_is_shown_while_it_comes(gateway: FakeGateway) -> None:
    screen = chat(gateway, "one two")
    begin = screen.shown.index("a. /help shows what else there is.\n") + 1
    assert screen.shown[begin : begin + 3] == ["one", " two", " one"], screen.shown


def test_a_fork_goes_its_own_way_and_back_returns(gateway: FakeGateway, baton: Baton) -> None:
    screen = chat(gateway, "one", "/fork", "aside", "/fork", "deeper", "/back", "/back", "two", "/back")
    assert screen.prompts == ["> "] * 2 + ["fork > "] * 2 + ["fork fork > "] * 2 + ["fork > "] + ["> "] * 3
    assert messages(gateway, "a") == [["one"], ["aside"], ["deeper"], ["two"]]
    prompts = [
        body["prompt"] for body in gateway.engine("a").bodies if "messages" in body and "prompt" in body
    ]
    aside, deeper, two = prompts
    assert deeper[: len(aside)] == aside, "the fork's fork goes on from it"
    assert two[: len(aside)] != aside
    assert two[:3] == aside[:3], "both go on from the first turn"
    assert "This is no side conversation" in screen.text
    assert list(baton.handoffs.list()) == []


def test_a_model_without_handoffs_is_sent_the_whole_conversation(gateway: FakeGateway) -> None:
    screen = chat(gateway, "hello", "again", "/fork", "aside", "/back", "more", model="plain")
    assert "error" not in screen.text
    assert messages(gateway, "plain") == [
        ["hello"],
        ["hello", "hello hello hello", "again"],
        ["hello", "hello hello hello", "again", "hello hello hello", "aside"],
        ["hello", "hello hello hello", "again", "hello hello hello", "more"],
    ]


def test_models_are_listed_and_changed(gateway: FakeGateway) -> None:
    screen = chat(gateway, "one", "/model", "/model none", "/model same", "two", "/model", "/new", "three")
    assert "* a\n  same\n" in screen.text
    assert "There is no model 'none'; there are: a, same, other, plain." in screen.text
    assert "  a\n* same\n" in screen.text
    assert messages(gateway, "same") == [["two"], ["three"]]


def test_an_error_is_a_line_and_the_conversation_goes_on(gateway: FakeGateway) -> None:
    engine = gateway.engine("a")
    screen = Screen("one", "two", "/nothing", "/", "two")

    def read(prompt: str) -> str:
        line = screen.read(prompt)
        engine.behaviour.call_error = (
            GenerationFailed() if screen.prompts[1:] and len(screen.prompts) == 2 else None
        )
        return line

    talk(gateway.url, read=read, write=screen.write, max_tokens=3)
    assert screen.text.count("error: ") == 1
    assert "generation_failed" in screen.text
    assert "There is no /nothing; /help" in screen.text
    assert messages(gateway, "a")[-1] == ["two"], "from where it was"


def test_an_answer_that_fails_midway_says_so() -> None:
    behaviour = FakeBehaviour(stream_error=GenerationFailed(), stream_error_after=2)
    with run_fake(FakeEngine("a", behaviour=behaviour, supports_handoffs=True)) as gateway:
        screen = chat(gateway, "one two")
    assert "error: " in screen.text
    assert "generation_failed" in screen.text


def test_a_conversation_that_expired_says_how_to_begin_anew(gateway: FakeGateway, baton: Baton) -> None:
    screen = Screen("one", "two", "/new", "three")

    def read(prompt: str) -> str:
        if len(screen.prompts) == 1:
            for handoff in baton.handoffs.list():
                baton.handoffs.delete(handoff)
        return screen.read(prompt)

    talk(gateway.url, read=read, write=screen.write, max_tokens=3)
    assert "handoff_not_found" in screen.text
    assert "/new begins anew" in screen.text
    assert messages(gateway, "a") == [["one"], ["three"]]


def test_ctrl_c_ends_an_answer_and_leaves_at_the_prompt(gateway: FakeGateway) -> None:
    screen = Screen("one two", "three", KeyboardInterrupt())

    def write(text: str) -> None:
        screen.write(text)
        if text == " two" and screen.shown.count(text) == 1:
            raise KeyboardInterrupt

    talk(gateway.url, read=screen.read, write=write, max_tokens=3)
    assert "(ended; say it again" in screen.text
    assert messages(gateway, "a") == [["one two"], ["three"]], "the second is the first turn again"


def test_what_rules_a_terminal_is_written_out() -> None:
    engine = FakeEngine("a", supports_handoffs=True)
    with run_fake(engine) as gateway:
        screen = chat(gateway, "\x1b]0;mine\x07", "/\x1b[2J")
    assert "\x1b" not in screen.text
    assert "There is no /\\x1b[2J" in screen.text


def test_lines_come_through_a_pipe_too(gateway: FakeGateway) -> None:
    command = [sys.executable, "-m", "baton_client.terminal", "--url", gateway.url, "--max-tokens", "3"]
    done = subprocess.run(
        command, input="one two\nthree\n", text=True, capture_output=True, check=True, timeout=60
    )
    assert done.stdout.startswith("a. /help")
    assert "one two one\n" in done.stdout
    assert messages(gateway, "a") == [["one two"], ["three"]]


# The command


def test_the_command_takes_address_model_and_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(create_key(tmp_path / "keys.json", "acme") + "\n")
    with run_fake(FakeEngine("a"), FakeEngine("b"), auth={"keys_file": tmp_path / "keys.json"}) as gateway:
        line = ["chat", "--url", f"{gateway.url}/v1", "-m", "b", "--key-file", str(key), "--max-tokens", "2"]
        done = CliRunner().invoke(cli.app, line, input="one two\n", catch_exceptions=False)
        assert done.stdout == "b. /help shows what else there is.\none two\n\n"
        with pytest.raises(OperatorError, match=r"baton chat: .*401"):
            CliRunner().invoke(cli.app, ["chat", "--url", gateway.url], catch_exceptions=False)


def test_what_cannot_be_reached_or_read_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_client.driver.time.sleep", lambda _seconds: None)  # between two tries
    (tmp_path / "empty").write_text("\n")
    for line, told in (
        (["--url", "http://127.0.0.1:1"], "No answer came from http://127.0.0.1:1"),
        (["--key-file", str(tmp_path / "none")], "--key-file: .*none: No such file"),
        (["--key-file", str(tmp_path / "empty")], "--key-file: .*empty: holds no key"),
    ):
        with pytest.raises(OperatorError, match=f"baton chat: {told}") as caught:
            CliRunner().invoke(cli.app, ["chat", *line], catch_exceptions=False)
        assert "\n" not in caught.value.message


def test_without_the_client_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "baton_client.terminal", None)
    with pytest.raises(OperatorError, match="the client is not installed: `pip install"):
        CliRunner().invoke(cli.app, ["chat"], catch_exceptions=False)


def test_a_gateway_without_a_model_that_chats_says_so() -> None:
    engine = FakeEngine("a")
    card = engine.cards()[0] | {"capabilities": ["embeddings"]}
    engine.cards = lambda: [card]  # type: ignore[method-assign]
    with run_fake(engine) as gateway, pytest.raises(NotFound, match="no model that chats"):
        chat(gateway)

"""Hold a conversation in the terminal: `baton chat`, or `python -m baton_client.terminal` elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton_client.client import BASE_URL, Baton
from baton_client.conversation import Conversation
from baton_client.errors import BatonError, InvalidRequest, NotFound, printable

HELP = """/fork         begin a side conversation here; /back returns to this point
/back         leave the side conversation, and forget it
/new          begin anew
/model NAME   begin anew with another model; without a name: list them
/help         show these lines
/quit         leave; so does the end of the input (Ctrl-D)
Ctrl-C ends an answer. Everything else is said to the model."""
UNSUPPORTED = "operation_unsupported"
"""Code of the error of a model without handoffs, or one that does not chat."""


class Terminal:
    """A conversation, and the side conversations within it.

    Args:
        model: its name; None: the first that chats.
        system: the system message; None: none.
        fields: of every request, such as `max_tokens`.
        read: returns the next line, and raises EOFError at the end.
        write: shows a text as it is.
    """

    def __init__(
        self,
        baton: Baton,
        model: str | None,
        system: str | None,
        fields: dict[str, Any],
        read: Callable[[str], str],
        write: Callable[[str], object],
    ) -> None:
        self._baton = baton
        self._model = model or self._chatting()[0]
        self._system = system
        self._fields = fields
        self._read = read
        self._write = write
        self._saves = True
        self._talks = [self._begin()]

    def _chatting(self) -> list[str]:
        """Return the names of the models that chat.

        Raises:
            NotFound: there are none.
        """
        cards = self._baton.models()
        names = [
            printable(str(card["id"])) or ""
            for card in cards
            if "generate" in card.get("capabilities", ("generate",))
        ]
        if not names:
            raise NotFound(404, None, "The gateway serves no model that chats.")
        return names

    def _begin(self) -> Conversation:
        return self._baton.conversation(self._model, self._system, save=self._saves)

    def run(self) -> None:
        """Talk until the input ends."""
        self._line(f"{self._model}. /help shows what else there is.")
        try:
            while True:
                try:
                    line = self._read(f"{'fork ' * (len(self._talks) - 1)}> ").strip()
                except (EOFError, KeyboardInterrupt):
                    self._line()
                    return
                if line == "/quit":
                    return
                if line:
                    self._take(line)
        finally:
            self._leave()

    def _take(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._command(*line[1:].split(maxsplit=1))
            else:
                self._say(line)
        except KeyboardInterrupt:
            self._line(" (ended; say it again, or something else)")
        except BatonError as error:
            self._line(f"error: {error}")
            if isinstance(error, NotFound) and error.code == "handoff_not_found":
                self._line("The conversation so far has expired: /new begins anew.")

    def _say(self, line: str) -> None:
        ended = "\n"

        def show(piece: str) -> None:
            nonlocal ended
            ended = piece
            self._write(printable(piece) or "")

        try:
            answer = self._talks[-1].say(line, told=show, **self._fields)
        except InvalidRequest as error:
            if not self._saves or error.code != UNSUPPORTED:
                raise
            self._saves = False  # the first turn already told: nothing has been said yet
            self._talks = [self._begin() for _ in self._talks]
            answer = self._talks[-1].say(line, told=show, **self._fields)
        if not ended.endswith("\n"):
            self._line()
        finish = answer.body["choices"][0].get("finish_reason")
        if finish not in ("stop", None):
            self._line(f"({printable(str(finish))})")

    def _command(self, name: str = "", value: str = "") -> None:
        if name == "fork":
            self._talks.append(self._talks[-1].fork())
            self._line("/back returns to this point.")
        elif name == "back" and len(self._talks) > 1:
            self._talks.pop().close()
        elif name == "back":
            self._line("This is no side conversation: /fork begins one.")
        elif name == "new":
            self._anew(self._model)
        elif name == "model" and value:
            served = self._chatting()
            if value in served:
                self._anew(value)
            else:
                self._line(f"There is no model '{printable(value)}'; there are: {', '.join(served)}.")
        elif name == "model":
            self._line(
                "\n".join(f"{'*' if name == self._model else ' '} {name}" for name in self._chatting())
            )
        elif name == "help":
            self._line(HELP)
        else:
            self._line(f"There is no /{printable(name)}; /help shows what there is.")

    def _anew(self, model: str) -> None:
        self._leave()
        self._model, self._saves = model, True
        self._talks = [self._begin()]
        self._line(f"{self._model}, from the beginning.")

    def _leave(self) -> None:
        """End the conversations, which deletes what they saved; what cannot be deleted expires."""
        while self._talks:
            with contextlib.suppress(BatonError):
                self._talks.pop().close()

    def _line(self, text: str = "") -> None:
        self._write(f"{text}\n")


def read_line(prompt: str) -> str:
    """Read a line of a person's, with editing and history; of a pipe without a prompt."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # importing it is what gives `input` its editing
    return input(prompt)


def write_text(text: str) -> None:
    """Show a text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def key_of(file: Path | None) -> str | None:
    """Read an API key from a file; None: there is none.

    Raises:
        ValueError: it cannot be read, or holds no key.
    """
    if file is None:
        return None
    try:
        key = file.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--key-file: {file}: {getattr(error, 'strerror', None) or 'no text'}") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"--key-file: {file}: holds no key: write one line with it")
    return key


def talk(
    url: str = BASE_URL,
    *,
    model: str | None = None,
    key: str | None = None,
    system: str | None = None,
    read: Callable[[str], str] = read_line,
    write: Callable[[str], object] = write_text,
    **fields: Any,
) -> None:
    """Hold a conversation with a gateway until the input ends.

    Args:
        url: of the gateway, with `/v1` at its end or without.
        model: its name; None: the first that chats.
        fields: of every request, such as `max_tokens`; those that are None are left out.

    Raises:
        BatonError: the gateway does not answer, refuses the key, or has no such model.
    """
    asked = {name: value for name, value in fields.items() if value is not None}
    with Baton(url, key) as baton:
        Terminal(baton, model, system, asked, read, write).run()


def main() -> None:
    """Run `python -m baton_client.terminal`."""
    parser = argparse.ArgumentParser(prog="baton_client.terminal", description="Chat with a Baton gateway.")
    parser.add_argument("--url", default=BASE_URL, help="address of the gateway")
    parser.add_argument("--model", help="name of the model; without it the first that chats")
    parser.add_argument("--key-file", type=Path, help="file with the API key")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, help="0: always the likeliest token")
    given = parser.parse_args()
    try:
        talk(
            given.url,
            model=given.model,
            key=key_of(given.key_file),
            system=given.system,
            max_tokens=given.max_tokens,
            temperature=given.temperature,
        )
    except (BatonError, ValueError) as error:
        raise SystemExit(f"baton_client: {error}") from None


if __name__ == "__main__":
    main()

"""Compile constraints in a process that can be killed: `python -m baton.engines.process.compile_server FD`.

Run as `python -m baton.engines.process.compile_server <descriptor>`. The process has one thread and the
compilers loaded, so that a forked child starts in milliseconds. Each message on its control socket is one
byte with the socket of a job. A child reads the job, compiles it as vLLM would, and reports each phase with
one byte. A signal ends the child, whatever its compiler is doing, when its processor time is used up or the
gateway closes the job's socket. The server ends when the gateway closes the control socket.

vLLM's `auto` backend tries xgrammar first, llguidance for what xgrammar refuses, and outlines for
`patternProperties` that both refuse. A constraint that they refuse costs no more; vLLM reports that itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.machinery
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

Made = TypeVar("Made")

FORKED, VALIDATED, COMPILED = b"f", b"v", b"c"
"""Bytes that a child reports its phases with."""
VALIDATION_SHARE = 0.1
"""Share of a job's processor time that validation may take, which vLLM does on the event loop."""
VALIDATION_S = 0.4
"""Seconds that validation may take in any case: a slow processor needs half of them for ordinary patterns."""
VOCABULARY = 4096
"""Tokens to compile for. A model has ten to sixty times as many; the time grows less than that."""
REGEX_CHARS = 100_000
"""Most characters of the regular expression that outlines makes of a schema; vLLM parses it on the loop."""
REFUSED = frozenset({"multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"})
FORMATS = frozenset(
    (
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer"),
        *("relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid"),
    )
)
"""Keywords with which vLLM does not use xgrammar, and formats with which it does: see `backend_xgrammar`."""
MEMORY_BYTES = 2 * 1024**3
"""Bytes of address space of a child."""
UNNEEDED = ("torch", "transformers", "xgrammar.matcher", "xgrammar.testing", "xgrammar.kernels")
"""Modules of 200 MB and four seconds that xgrammar imports for masks and tokenizers, not for its compiler."""


class _Absent(types.ModuleType):
    """A module whose every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextlib.contextmanager
def _without(names: tuple[str, ...]) -> Iterator[None]:
    for name in names:
        module = _Absent(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    yield
    for name in names:
        del sys.modules[name]


def vocabulary(size: int = VOCABULARY) -> list[bytes]:
    """Return every byte, and words of two to ten letters, half of them after a space; always the same."""
    chance = random.Random(0)
    found = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(found) < size - 1:
        letters = chance.choices(
            b"etaoinshrdlcumwfgypbvkjxqz", k=chance.choice((2, 3, 3, 4, 4, 5, 6, 7, 8, 10))
        )
        found[chance.choice((b"", b" ")) + bytes(letters)] = None
    return [*found, b"</s>"]


def may_be_refused(root: Any) -> bool:
    """Return whether vLLM may use another backend for a schema that xgrammar accepts; in doubt, True."""
    open_values = [root]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            limited = "minLength" in value or "maxLength" in value
            patterns, several = value.get("patternProperties"), value.get("allOf")
            if (
                REFUSED & value.keys()
                or (limited and ("pattern" in value or "format" in value))
                or (isinstance(value.get("format"), str) and value["format"] not in FORMATS)
                or (isinstance(patterns, dict) and ("properties" in value or len(patterns) > 1))
                or (isinstance(several, list) and len(several) > 1)
            ):
                return True
            open_values += value.values()
        elif isinstance(value, list):
            open_values += value
    return False


class Compilers:
    """The compilers of vLLM's backends, all for the same small vocabulary."""

    def __init__(self) -> None:
        sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
        import tvm_ffi  # noqa: F401  # what xgrammar is bound by; it does without torch

        with _without(UNNEEDED):
            import xgrammar
        import llguidance
        import outlines_core  # type: ignore[import-untyped]  # it ships no types
        import outlines_core.json_schema  # type: ignore[import-untyped]  # what vLLM calls of it

        self._xgrammar: Any = xgrammar
        self._guidance: Any = llguidance.LLMatcher
        self._bytes = llguidance.LLTokenizer("byte")
        self._outlines: Any = outlines_core
        tokens = vocabulary()
        end = len(tokens) - 1
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[end]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=True)
        self._words = outlines_core.Vocabulary(end, {token: [at] for at, token in enumerate(tokens[:-1])})

    def parse(self, kind: str, text: str) -> list[Any]:
        """Validate a constraint as vLLM does.

        Args:
            kind: `json`, `regex`, `structural_tag` or `grammar`; or `fit`, a text and the grammar that it
                must be of: the process ends where it is not.

        Returns:
            What is left to compile.
        """
        grammar = self._xgrammar.Grammar
        if kind == "json":
            made = _tried(lambda: grammar.from_json_schema(text))
            if made is not None and not may_be_refused(json.loads(text)):
                return [made]
            self._guided(text)
            return [made, self._regex(text) if '"patternProperties"' in text else None]
        if kind == "regex":
            self._read(self._guidance.grammar_from_regex, text)
            return [_tried(lambda: grammar.from_regex(text)), text]
        if kind == "structural_tag":
            return [_tried(lambda: self._tags(text))]
        if kind == "fit":
            if not _tried(partial(self._fits, **json.loads(text))):
                os._exit(1)
            return []
        lark = not any("::=" in line for line in text.split("\n"))
        if lark:
            self._read(self._guidance.grammar_from_lark, text)
        return [_tried(lambda: grammar.from_lark(text) if lark else grammar.from_ebnf(text))]

    def compile(self, parsed: list[Any]) -> None:
        """Compile what `parse` left."""
        for item in parsed:
            if isinstance(item, str):
                _tried(partial(self._outlines.Index, item, self._words))
            elif item is not None:
                _tried(partial(self._compiler.compile_grammar, item))

    def _tags(self, text: str) -> Any:
        """Read a structural tag, also of vLLM's older form, a list of structures and their triggers."""
        found = json.loads(text)
        if "structures" not in found:
            return self._xgrammar.Grammar.from_structural_tag(text)
        items = [
            self._xgrammar.StructuralTagItem(
                begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"]
            )
            for each in found["structures"]
        ]
        return self._xgrammar.Grammar.from_structural_tag(items, found["triggers"])

    def _read(self, make: Callable[[str], Any], text: str) -> None:
        """Read a grammar with llguidance, which reads what xgrammar does not, and checks inputs."""
        _tried(lambda: self._guidance.validate_grammar(make(text), None))

    def _fits(self, text: str, syntax: str, definition: str) -> bool:
        """Return whether a text is of a grammar, which llguidance reads byte by byte."""
        matcher = self._guidance
        made = matcher.grammar_from_regex if syntax == "regex" else matcher.grammar_from_lark
        found = matcher(self._bytes, made(definition), log_level=0)
        read: bool = found.consume_tokens(self._bytes.tokenize_bytes(text.encode()))
        return read and bool(found.is_accepting())

    def _guided(self, schema: str) -> None:
        made = _tried(
            lambda: self._guidance.grammar_from_json_schema(schema, defaults={"whitespace_flexible": True})
        )
        if made is not None:
            _tried(lambda: self._guidance.validate_grammar(made, None))

    def _regex(self, schema: str) -> str | None:
        from re import _parser  # type: ignore[attr-defined]  # as vLLM does

        pattern = _tried(lambda: str(self._outlines.json_schema.build_regex_from_schema(schema)))
        if pattern is not None:
            if len(pattern) > REGEX_CHARS:
                os._exit(1)
            _tried(lambda: _parser.parse(pattern))
        return pattern


def _tried(make: Callable[[], Made]) -> Made | None:
    """Compile; None if the compiler refuses. End the process if it runs out of memory."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001  # the compilers raise anything; vLLM reports the refusal
        if isinstance(error, MemoryError | RecursionError) or "bad_alloc" in str(error):
            os._exit(1)
        return None


def _end_with(job: socket.socket) -> None:
    """Have the kernel end this process by SIGIO when the other end of the socket closes."""
    fcntl.fcntl(job, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(job, fcntl.F_SETFL, fcntl.fcntl(job, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(job, 0)
    if poll.poll(0):  # it has closed already
        os._exit(1)


def _serve(job: socket.socket, compilers: Compilers) -> None:
    """Read a job, validate it and compile it, within the limits of a child process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with job.makefile("rb") as lines:
        asked = json.loads(lines.readline())
    _end_with(job)
    signal.setitimer(signal.ITIMER_PROF, max(VALIDATION_S, asked["seconds"] * VALIDATION_SHARE))
    parsed = compilers.parse(asked["kind"], asked["text"])
    signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
    job.sendall(VALIDATED)
    compilers.compile(parsed)
    job.sendall(COMPILED)


def _fork(control: socket.socket, job: socket.socket, compilers: Compilers) -> None:
    try:
        pid = os.fork()
    except OSError:  # too many processes: the gateway sees the job's socket close
        return
    if not pid:
        try:
            control.close()
            job.sendall(FORKED)
            _serve(job, compilers)
        finally:
            os._exit(0)


def main() -> None:
    """Fork a child for every job that arrives on the descriptor named on the command line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    with socket.socket(fileno=int(sys.argv[1])) as control:
        compilers = Compilers()
        gc.freeze()  # keeps the loaded modules shared between the children
        while True:
            byte, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not byte:
                return
            with socket.socket(fileno=descriptors[0]) as job:
                _fork(control, job, compilers)


if __name__ == "__main__":
    main()

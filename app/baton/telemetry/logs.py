"""Write logs: one JSON object a line, or coloured text on a terminal.

Whatever a client sends, a line stays one line, its values are cut to a readable length, and an exception's
text, which may quote a request, is logged at level debug only.

Every line goes through one structlog pipeline, also those of uvicorn and of vLLM in this process. What engine
processes print is read from a pipe and logged the same way (`EngineOutput`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal, TextIO

import structlog
from structlog.typing import ExcInfo

from baton.errors import SettingsError

VLLM_LINE = re.compile(
    r"^\((?P<process>\w+)[^)]*\) (?P<level>[A-Z]+) [\d-]+ [\d:]+ (?P<place>\[[^]]+\]) ?(?P<text>.*)"
)
RAISED = re.compile(r"(?:\([^)]*\)\s*)?([\w.]*(?:Error|Exception)): (.+)")
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
SYMPTOMS = ("See root cause above", "Engine core init", "EngineCore encountered an issue", "EngineDeadError")
"""Texts of exceptions by which vLLM's processes tell that another one failed."""
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MAX_LINE = 4000
MAX_VALUE = 512
LONGER_VALUES = {"event": MAX_LINE, "line": MAX_LINE, "exception": 16_000}
"""Keys with longer values: messages of other libraries, output of engines, tracebacks."""
NUMBERS = (bool, int, float)  # a union would be made anew for every value
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in b"\n\t"}
MAX_CAUSES = 8
READ_WITHIN_S = 5.0
"""Seconds that reading the engines' last output may take when the gateway ends."""
LogFormat = Literal["auto", "json", "console"]


def configure_logs(
    level: str, log_format: LogFormat, stream: TextIO, labels: Mapping[str, str] | None = None
) -> None:
    """Send every log line of this process to `stream`, each with these labels."""
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[Any] = [
        lambda _logger, _method, event: {**(labels or {}), **event},
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(_whole_traceback if level == "debug" else _places),
        cap_values,
    ]
    if console:
        shared.append(show_controls)
    renderer: Any = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer()
    )
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(threshold, logging.WARNING))


def _whole_traceback(exc_info: ExcInfo) -> str:
    return "".join(traceback.format_exception(*exc_info))


def _places(exc_info: ExcInfo) -> str:
    """Return the classes and frames of an exception and its causes, without their texts, which may quote
    requests.
    """
    lines: list[str] = []
    error: BaseException | None = exc_info[1]
    for _ in range(MAX_CAUSES):
        if error is None:
            break
        lines.append(f"{type(error).__module__}.{type(error).__qualname__}")
        lines += [line.rstrip() for line in traceback.format_tb(error.__traceback__)]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(lines)


def cap_values(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Cut long values of a log line."""
    for key, value in event.items():
        if value is None or isinstance(value, NUMBERS) or key.startswith("_"):
            continue
        text = value if isinstance(value, str) else repr(value)
        limit = LONGER_VALUES.get(key, MAX_VALUE)
        if len(text) > limit:
            event[key] = f"{text[:limit]}... ({len(text)} characters)"
    return event


def show_controls(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape control characters, so that logged text cannot control a terminal."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = value.translate(CONTROLS)
    return event


class AuditLog:
    """Adds what operators do, and deletions, to a file: a line of JSON each, with nothing of what was said.

    The file is opened for each line, so that it may be moved away at any time, as logrotate does.

    Args:
        file: the file; None: there is none.
        lost: called when a line could not be written, which is logged.
        wall: returns Unix time.

    Raises:
        SettingsError: the file cannot be written.
    """

    def __init__(
        self,
        file: Path | None,
        lost: Callable[[], None] = lambda: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._file = file.expanduser() if file is not None else None
        self._lost = lost
        self._wall = wall
        if self._file is not None:
            try:
                os.close(self._open(self._file))
            except OSError as error:
                raise SettingsError(f"auth.audit_file: {self._file}: {error.strerror}") from None

    def write(self, act: str, *, what: str, outcome: str, **who: str | None) -> None:
        """Add a line.

        Args:
            act: such as `engine.stop`.
            what: what it was done to: a path, or a name.
            outcome: `done`, `refused` or `failed`.
            who: the tenant, the ids of the key and of the request, an error's code; the user of a command.
        """
        if self._file is None:
            return
        at = datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="milliseconds")
        line = {"at": at.replace("+00:00", "Z"), "act": act, "what": what[:MAX_VALUE], "outcome": outcome}
        line |= {name: value for name, value in who.items() if value is not None}
        try:
            descriptor = self._open(self._file)
            try:
                os.write(descriptor, f"{json.dumps(line)}\n".encode())  # at once, whoever else adds lines
            finally:
                os.close(descriptor)
        except OSError as error:
            self._lost()
            structlog.get_logger("baton.audit").error("audit_line_lost", **line, cause=error.strerror)

    @staticmethod
    def _open(file: Path) -> int:
        return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


class EngineOutput:
    """Reads what this process and its engines print, line by line, and keeps the last lines.

    Installed on file descriptors 1 and 2, because engine processes inherit those; the gateway's own logs and
    progress go to `terminal`, the former stderr. vLLM prints much that nobody can act on: of an engine
    process's error the first line is logged, everything else only at level debug.

    Attributes:
        terminal: the process's original stderr.
    """

    KEPT_LINES = 400

    def __init__(self) -> None:
        self.last_lines: deque[str] = deque(maxlen=self.KEPT_LINES)
        self.terminal: TextIO = sys.stderr
        self._saved: tuple[int, int] | None = None
        self._last_line = f"{secrets.token_hex(16)}\n"  # no other process can print it
        self._end = -1
        self._reader: threading.Thread | None = None

    def __enter__(self) -> EngineOutput:
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(1), os.dup(2))
        self.terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
        read_end, write_end = os.pipe()
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        self._end = write_end
        pipe = os.fdopen(read_end, encoding="utf-8", errors="replace")
        self._reader = threading.Thread(target=self._read, args=(pipe,), daemon=True, name="engine-output")
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._saved is None:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        for target, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, target)
            os.close(saved)
        self._saved = None
        self._stop_reading()

    def _stop_reading(self) -> None:
        """End the reader after the output so far; a process that outlives us would keep the pipe open."""
        with contextlib.suppress(BrokenPipeError), os.fdopen(self._end, "w", encoding="ascii") as pipe:
            pipe.write(f"\n{self._last_line}")
        if self._reader is not None:
            self._reader.join(READ_WITHIN_S)

    def _read(self, pipe: IO[str]) -> None:
        log = structlog.get_logger("baton.engine_output")
        last_place = None
        with pipe:
            for raw in pipe:
                if raw == self._last_line:
                    return
                line = ANSI.sub("", raw).strip()[:MAX_LINE]
                if not line:
                    continue
                self.last_lines.append(line)
                found = VLLM_LINE.match(line)
                if found and _is_engine_error(found) and found["place"] != last_place:
                    log.error("engine_output", line=line)
                else:
                    log.debug("engine_output", line=line)
                last_place = found["place"] if found else None

    def root_cause(self) -> str | None:
        """Find the exception that the last traceback ends with, the likely cause of an engine's failure.

        Returns:
            Its class and message, and the line that raised it, such as `ValueError: no such layer
            (llama.py:120)`; None: there is no traceback. What one process says of another's end is no cause.
        """
        lines = [VLLM_LINE.match(line) for line in self.last_lines]
        texts = [
            (found["text"] if found else line).strip()
            for line, found in zip(self.last_lines, lines, strict=True)
        ]
        for number in range(len(texts) - 1, -1, -1):
            found = RAISED.match(texts[number])
            if found is None or any(symptom in texts[number] for symptom in SYMPTOMS):
                continue
            frame = next((FRAME.match(text) for text in texts[number::-1] if FRAME.match(text)), None)
            place = f" ({Path(frame['file']).name}:{frame['line']})" if frame else ""
            return f"{found[1].rpartition('.')[2]}: {found[2][:600]}{place}"
        return None


def _is_engine_error(line: re.Match[str]) -> bool:
    """Return whether an engine process logged an error; this process logs its own."""
    return line["level"] in ("ERROR", "CRITICAL") and line["process"] != "MainProcess"

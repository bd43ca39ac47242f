from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

import structlog

from baton.telemetry.logs import EngineOutput, configure_logs


def test_a_line_is_one_json_object_whatever_is_in_it() -> None:
    stream = io.StringIO()
    configure_logs("info", "json", stream)
    hostile = 'a\r\nb\x1b[31m"}{' + "x" * 10
    structlog.get_logger().info("event", text=hostile)
    logging.getLogger("uvicorn.error").error("oh %s", hostile)
    lines = stream.getvalue().splitlines()
    assert [json.loads(line)["level"] for line in lines] == ["info", "error"]
    assert json.loads(lines[0])["text"] == hostile


def test_lines_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    configure_logs("warning", "json", stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]


def test_what_an_engine_process_prints_is_kept_and_its_cause_of_death_found() -> None:
    script = """
import subprocess, sys
from baton.telemetry.logs import EngineOutput, configure_logs
with EngineOutput() as output:
    configure_logs("info", "json", output.terminal)
    subprocess.run([sys.executable, "-c", "raise ValueError('the weights are gone')"])
    import time; latest = time.monotonic() + 20
    while not (cause := output.root_cause()) and time.monotonic() < latest:
        time.sleep(0.01)
print("cause:", cause)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "cause: ValueError: the weights are gone (<string>:1)" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_process_that_still_holds_the_pipe_does_not_hold_up_the_end() -> None:
    """Python's resource tracker outlives the engines; what was printed before the end is read all the same."""
    script = """
import subprocess, sys
from baton.telemetry.logs import EngineOutput, configure_logs
with EngineOutput() as output:
    configure_logs("info", "json", output.terminal)
    held = subprocess.Popen([sys.executable, "-c", "print('the last words', flush=True); input()"], stdin=-1)
    while not output.last_lines:
        pass
    print("half a line", end="")
print(output._reader.is_alive(), held.poll(), list(output.last_lines))
held.communicate()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False None ['the last words', 'half a line']\n"


def test_the_cause_is_what_the_engine_raised_not_what_its_parent_said_of_it() -> None:
    output = EngineOutput()
    output.last_lines.append("(EngineCore pid=1) ERROR 11-21 11:37:17 [core.py:1] RuntimeError: no memory")
    output.last_lines.append(
        "(MainProcess pid=1) RuntimeError: Engine core initialization failed. See root cause above."
    )
    assert output.root_cause() == "RuntimeError: no memory"


def test_the_cause_names_the_line_that_raised_it() -> None:
    """vLLM prints a core's traceback with a prefix a line, and tells of it in other processes afterwards."""
    place = "(EngineCore pid=7) ERROR 11-21 11:37:17 [core.py:1]"
    output = EngineOutput()
    output.last_lines += [
        f"{place} Traceback (most recent call last):",
        f'{place}   File "/x/vllm/v1/engine/core.py", line 900, in run_engine_core',
        f"{place}     engine_core = EngineCoreProc()",
        f'{place}   File "/x/vllm/model_executor/models/llama.py", line 120, in load_weights',
        f"{place}     raise ValueError(name)",
        f"{place} vllm.errors.ValueError: no layer 31",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) "
        "for the root cause.",
    ]
    assert output.root_cause() == "ValueError: no layer 31 (llama.py:120)"


def test_of_an_engine_s_traceback_one_line_is_shown() -> None:
    place = "(EngineCore pid=7) ERROR 11-21 11:37:17 [core.py:1]"
    lines = [f"{place} it failed", f"{place} Traceback (most recent call last):", f"{place} ValueError: no"]
    noise = [
        "(MainProcess pid=1) ERROR 11-21 11:37:17 [serving.py:5] of a client",
        "(Worker pid=8) INFO 1 2 [a.py:1] x",
    ]
    script = f"""
import sys
from baton.telemetry.logs import EngineOutput, configure_logs
with EngineOutput() as output:
    configure_logs("info", "json", output.terminal)
    print("\\n".join({lines + noise!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    shown = [json.loads(line)["line"] for line in done.stderr.splitlines()]
    assert shown == lines[:1]


def test_an_exceptions_text_shows_at_level_debug_only_but_its_kind_place_and_cause_always() -> None:
    quoted = " ".join(["quoting", "a", "prompt"])  # a source line is shown as it is
    for level in ("info", "debug"):
        stream = io.StringIO()
        configure_logs(level, "json", stream)  # type: ignore[arg-type]
        try:
            try:
                {}[quoted]
            except KeyError as error:
                raise ValueError(quoted) from error
        except ValueError as error:
            structlog.get_logger().error("failed", exc_info=error)
        told = json.loads(stream.getvalue())["exception"]
        assert "KeyError" in told
        assert "ValueError" in told
        assert "test_logs.py" in told
        assert (quoted in told) == (level == "debug")

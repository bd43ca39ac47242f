"""Claude Code and Codex themselves read and edit a file by calls of tools, and nothing of theirs is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from support.programs import (  # after the skip
    CONTEXT,
    Program,
    call,
    install,
    needed,
    offers_tools,
    results,
    run_writing,
)
from support.scripted_engines import ScriptedGateway  # after the skip

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900), needed]
SUMMARY = "The file a.py was mended."
DONE = "It is mended."


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("npm"))


def refused(gateway: ScriptedGateway) -> dict[str, float]:
    """Requests that were not answered, by route and class of status; the programs look whether `/` is there."""
    page = gateway.http.get("/metrics").text
    found = re.findall(r'baton_http_requests_total\{code_class="(4xx|5xx)",.*?route="([^"]+)"\} (\S+)', page)
    return {f"{kind} {route}": float(count) for kind, route, count in found if route != "other"}


def usage(gateway: ScriptedGateway, program: str) -> None:
    """State of each request how much of its prompt came from the cache."""
    used = gateway.engine.client.used
    print(f"{program}: of each request, tokens of the prompt and of them read from the cache: {used}")
    cached, whole = sum(cached for _, cached in used), sum(prompt for prompt, _ in used)
    print(f"{program}: {len(used)} requests, {cached / whole:.2f} of all prompts read from the cache")


def claude_writes(prompt: str) -> str:
    if not offers_tools(prompt):
        return SUMMARY
    path = re.findall(r"(/\S+/a\.py)", prompt)[-1]
    answers = [
        call("Read", {"file_path": path}),
        call("Edit", {"file_path": path, "old_string": "x = 1", "new_string": "x = 2"}),
    ]
    done = results(prompt)
    return answers[done] if done < len(answers) else DONE


@pytest.mark.fault("E27")
def test_claude_code_reads_edits_compacts_and_goes_on(commands: Path, tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    (work / "a.py").write_text("x = 1\n")
    with run_writing(claude_writes) as gateway:
        program = Program(
            commands / "claude",
            home,
            work,
            {
                "ANTHROPIC_BASE_URL": gateway.url,
                "ANTHROPIC_AUTH_TOKEN": "none",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
            },
        )
        asked = ["--output-format", "json", "--allowedTools=Read,Edit", "-p"]
        first = json.loads(program.run(*asked, f"Mend {work}/a.py: x is 2."))
        assert (first["result"], first["is_error"]) == (DONE, False)
        assert (work / "a.py").read_text() == "x = 2\n"
        asked = ["--continue", *asked]
        assert json.loads(program.run(*asked, "/compact"))["is_error"] is False
        last = json.loads(program.run(*asked, f"And {work}/a.py now?"))
        assert (last["result"], last["is_error"]) == (DONE, False)
        usage(gateway, "Claude Code")
        assert refused(gateway) == {}


PATCH = "*** Begin Patch\n*** Update File: a.py\n@@\n-x = 1\n+x = 2\n*** End Patch\n"


@pytest.mark.fault("E27")
def test_codex_reads_edits_compacts_and_goes_on(commands: Path, tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    (home / ".codex").mkdir(parents=True)
    (work / "a.py").write_text("x = 1\n")

    def codex_writes(prompt: str) -> str:
        if not offers_tools(prompt):
            return SUMMARY
        if SUMMARY in prompt:
            return DONE
        answers = [
            call("exec_command", {"cmd": "cat a.py"}),
            call("apply_patch", {"input": PATCH}),
        ]
        done = results(prompt)
        return answers[done] if done < len(answers) else DONE

    with run_writing(codex_writes) as gateway:
        settings = {
            "model": "gpt-5.5",
            "model_provider": "baton",
            "model_context_window": CONTEXT,
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        provider = {"name": "Baton", "base_url": f"{gateway.url}/v1", "wire_api": "responses"}
        lines += [
            "[model_providers.baton]",
            *(f"{key} = {json.dumps(value)}" for key, value in provider.items()),
        ]
        (home / ".codex" / "config.toml").write_text("\n".join(lines) + "\n")
        program = Program(commands / "codex", home, work, {})
        asked = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        assert program.run(*asked, "Mend a.py: x is 2.").strip() == DONE
        assert (work / "a.py").read_text() == "x = 2\n"
        last = program.run(
            *asked, "-c", "model_auto_compact_token_limit=1000", "resume", "--last", "And now?"
        )
        assert last.strip().endswith(DONE)
        assert SUMMARY in gateway.engine.text(gateway.engine.client.prompts[-1]), "it was compacted"
        usage(gateway, "Codex")
        assert refused(gateway) == {}

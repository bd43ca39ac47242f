"""What `baton serve` makes of its own flags, before vLLM is imported."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from baton import cli
from baton.admission.api_keys import Keyring, read_keys
from baton.admission.usage import Row, UsageFile
from baton.config.groups import EngineSettings
from baton.config.settings import Settings
from baton.errors import SettingsError


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Settings]:
    """The settings that the gateway would run with."""
    taken: list[Settings] = []

    def line(arguments: list[str], *, file: Path | None, own: list[str], **options: bool) -> SimpleNamespace:
        assert "--handoff" in own, "to be suggested where it is misspelt"
        args = {"line": arguments[1:]} | ({"file": str(file)} if file else {})
        engine = EngineSettings(name="m", model=[*arguments, "m"][0], args=args, **options)
        gateway = {"edge": {"keep_alive_s": 5}, "log_level": "error", "uds": "/tmp/x"}
        flags = {"edge.keep_alive_s": "baton serve: --sse-keep-alive-interval"}
        return SimpleNamespace(engine=engine, gateway=gateway, flags=flags)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "check_vllm", lambda: None)
    monkeypatch.setattr(cli, "apply_environment", lambda *_, **__: None)
    launch = SimpleNamespace(  # the real one imports vLLM
        read_command_line=line,
        told_by_flag=lambda message, _flags: message,
        help_text=lambda word: f"[{word}]",
    )
    monkeypatch.setitem(sys.modules, "baton.engines.vllm.flags", launch)

    def run(settings: Settings, reread: Callable[[], Settings]) -> None:
        assert reread().model_dump() == settings.model_dump(), "what is read again is what was read"
        taken.append(settings)

    monkeypatch.setattr("baton.serve.serve", run)
    return taken


def test_the_list_of_models_has_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a narrow terminal too: they are there to be copied."""
    folder = tmp_path / ("a-long-name-of-a-folder-" * 6)
    for name, value in {"BATON_MODELS_DIR": str(folder), "COLUMNS": "50"}.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(cli.app, ["models"], catch_exceptions=False)
    assert f"smollm2: {folder / 'smollm2'}" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("line", "handoff", "latent"),
    [
        (["m"], False, False),
        (["m", "--handoff"], True, False),
        (["--handoff", "m"], True, False),
        (["m", "--no-handoff"], False, False),
        (["m", "--handoff", "--latent"], True, True),
        (["m", "--handoff", "--no-latent"], True, False),
    ],
)
def test_a_model_of_the_command_line_hands_over_when_it_is_told_to(
    served: list[Settings], line: list[str], *, handoff: bool, latent: bool
) -> None:
    done = CliRunner().invoke(cli.app, ["serve", *line, "--seed", "3"], catch_exceptions=False)
    assert done.exit_code == 0
    (settings,) = served
    (engine,) = settings.engines
    assert (engine.model, engine.handoff, engine.latent) == ("m", handoff, latent)
    assert engine.args == {"line": ["--seed", "3"]}


def test_flags_of_the_gateway_become_settings_and_baton_s_own_win(
    served: list[Settings], tmp_path: Path
) -> None:
    (tmp_path / "baton.toml").write_text("port = 17\n[edge]\nheader_s = 7\n")
    line = ["serve", "m", "--log-level", "WARNING"]
    CliRunner().invoke(cli.app, line, catch_exceptions=False)
    (settings,) = served
    assert (settings.port, settings.edge.header_s, settings.edge.keep_alive_s) == (17, 7, 5)
    assert (settings.log_level, settings.uds) == ("warning", Path("/tmp/x"))


@pytest.mark.parametrize("line", [["--config", "x.yaml"], ["m", "--config", "x.yaml", "--seed", "3"]])
def test_a_yaml_file_of_flags_goes_to_vllm_s_parser(
    served: list[Settings], line: list[str], tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text("model: m\nseed: 3\n")
    (tmp_path / "baton.toml").write_text("port = 17\n")
    CliRunner().invoke(cli.app, ["serve", *line], catch_exceptions=False)
    (settings,) = served
    assert settings.engines[0].args["file"] == "x.yaml"
    assert settings.port == 17, "the settings beside it are read as without it"


YAML_FILES = {
    "a: [": "x.yaml: not valid YAML: ",
    "- a": "x.yaml: must be a mapping of vLLM's flags, such as `max-model-len: 4096`",
    "": "x.yaml: must be a mapping",
    "1: 2": "x.yaml: must be a mapping",
    "config: y.yaml": "x.yaml: config: leave it out",
}


@pytest.mark.parametrize("text", YAML_FILES)
def test_a_yaml_file_that_is_none_is_a_line(served: list[Settings], text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        CliRunner().invoke(cli.app, ["serve", "m", "--config", "x.yaml"], catch_exceptions=False)
    assert caught.value.message.startswith(YAML_FILES[text])
    assert "\n" not in caught.value.message
    with pytest.raises(SettingsError, match=r"y\.yml: No such file"):
        CliRunner().invoke(cli.app, ["serve", "m", "--config", "y.yml"], catch_exceptions=False)
    assert served == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("serv", "baton: No such command 'serv'"),
        ("serve --port many", "baton serve: Invalid value for '--port': "),
        ("doctor --confg x", "baton doctor: No such option: --confg"),
        ("keys create", "baton keys create: Missing argument 'tenant'"),
        ("serve --latent m", "baton serve: --latent needs --handoff"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_says_where(
    line: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", *line.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    (said,) = capsys.readouterr().err.splitlines()
    assert ended.value.code in (1, 2)
    assert said.startswith(told)


def test_a_command_that_succeeds_or_fails_says_so_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for line, code in (("--version", 0), ("serve --help", 0), ("plugins --json", 0), ("keys", 2)):
        monkeypatch.setattr(sys, "argv", ["baton", *line.split()])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == code, line


def test_help_searches_vllm_s_flags(served: list[Settings]) -> None:
    done = CliRunner().invoke(cli.app, ["serve", "m", "--help=max"], catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (0, "[max]\n")
    done = CliRunner().invoke(cli.app, ["serve", "--help"], catch_exceptions=False)
    assert "--help=WORD" in done.stdout
    assert served == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (["--handoff"], "belong to a MODEL on the command line"),
        (["--no-handoff"], "belong to a MODEL on the command line"),
        (["m", "--latent"], "--latent needs --handoff"),
        (["m", "--latent", "--no-handoff"], "--latent needs --handoff"),
    ],
)
def test_flags_without_what_they_need_are_refused(
    served: list[Settings], line: list[str], reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        CliRunner().invoke(cli.app, ["serve", *line], catch_exceptions=False)
    assert served == []


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Runs `baton keys` with files of the test's own; returns what it printed."""
    for name, file in (("AUTH__KEYS_FILE", "keys"), ("AUTH__AUDIT_FILE", "audit"), ("USAGE__FILE", "usage")):
        monkeypatch.setenv(f"BATON_{name}", str(tmp_path / file))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        return CliRunner().invoke(cli.app, ["keys", *words], catch_exceptions=False).stdout

    return run


def test_keys_are_made_shown_rotated_and_revoked_and_each_is_a_line_of_the_audit_log(
    keys: Callable[..., str], tmp_path: Path
) -> None:
    key = keys("create", "acme", "--model", "a", "--model", "b-*", "--expires", "30d", "--share", "3").strip()
    found = Keyring(read_keys(tmp_path / "keys")).find(key)
    assert found is not None
    assert (found.models, found.share, found.operator) == (("a", "b-*"), 3, False)
    listed = keys("list")
    assert all(word in listed for word in (found.id, "acme", "a, b-*", "3"))
    rotated = keys("rotate", found.id, "--keep", "1h").strip()
    keyring = Keyring(read_keys(tmp_path / "keys"))
    assert (keyring.find(key) is not None, keyring.find(rotated) is not None) == (True, True)
    keys("revoke", found.id)
    assert read_keys(tmp_path / "keys") == []
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(line["act"], line["what"], line["tenant"]) for line in lines] == [
        (f"key.{act}", found.id, "acme") for act in ("create", "rotate", "revoke")
    ]
    assert not any(secret in (tmp_path / "audit").read_text() for secret in (key, rotated))


def test_budgets_show_what_is_used_of_them(keys: Callable[..., str], tmp_path: Path) -> None:
    keys("create", "acme", "--day-tokens", "1000", "--month-tokens", "90000")
    keys("create", "globex", "--month-tokens", "5")
    keys("create", "initech")
    ids = [key.id for key in read_keys(tmp_path / "keys")]
    assert "1000" in keys("budgets"), "before any request there is no file"
    file, today = UsageFile(tmp_path / "usage"), datetime.now(UTC).date().isoformat()
    counts = Counter(requests=1, failed=0, prompt_tokens=400, completion_tokens=21)
    file.add({Row(today, "acme", ids[0], "a"): counts})
    file.close()
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in keys("budgets").splitlines()
        if "│" in line
    ]
    assert rows == [
        [ids[0], "acme", "421", "1000", "421", "90000"],
        [ids[1], "globex", "0", "no limit", "0", "5"],
    ]

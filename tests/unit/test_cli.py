"""What `baton serve` makes of its own flags, before vLLM is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from baton import cli
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
    monkeypatch.setattr("baton.serve.serve", taken.append)
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

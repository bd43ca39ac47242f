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

    def engine(arguments: list[str], **options: bool) -> EngineSettings:
        return EngineSettings(name="m", model=arguments[0], args={"line": arguments[1:]}, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "check_vllm", lambda: None)
    monkeypatch.setattr(cli, "apply_environment", lambda *_, **__: None)
    launch = SimpleNamespace(settings_from_command_line=engine)  # the real one imports vLLM
    monkeypatch.setitem(sys.modules, "baton.engines.vllm.arguments", launch)
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

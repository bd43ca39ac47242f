from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from support.table_tests import each

from baton.config.groups import Frozen
from baton.config.settings import Settings, load_settings, variables
from baton.errors import SettingsError


def write(folder: Path, text: str) -> Path:
    path = folder / "baton.toml"
    path.write_text(text)
    return path


def test_defaults_serve_the_embedded_models_on_loopback() -> None:
    settings = load_settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert [engine.model for engine in settings.engines] == ["smollm2", "flood-tiny"]
    assert settings.loopback


def test_a_file_the_environment_and_the_command_line_rule_in_that_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path, 'port = 1111\nhost = "127.0.0.2"\nlog_level = "error"')
    monkeypatch.setenv("BATON_PORT", "2222")
    monkeypatch.setenv("BATON_HOST", "127.0.0.3")
    settings = load_settings(config, port=3333)
    assert (settings.port, settings.host, settings.log_level) == (3333, "127.0.0.3", "error")


@pytest.mark.parametrize("own", [None, "123"])
def test_engines_keep_freed_memory_unless_the_operator_says_otherwise(own: str | None) -> None:
    """What glibc reads when a process begins; told to a child, as engines are."""
    script = (
        "import os, subprocess; from baton.config.settings import Settings; from baton.config.vllm_environment import apply_environment; "
        "apply_environment(Settings(), offline=True, compiles=False); "
        "subprocess.run(['printenv', 'MALLOC_MMAP_THRESHOLD_', 'MALLOC_TRIM_THRESHOLD_'], check=True)"
    )
    own_word = {"MALLOC_TRIM_THRESHOLD_": own} if own else {}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | own_word, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(32 * 2**20), own or str(2**30)]


def test_a_group_may_come_half_from_the_file_and_half_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path, '[limits]\nbody_bytes = "1MiB"')
    monkeypatch.setenv("BATON_LIMITS__BODY_DEPTH", "10")
    limits = load_settings(config).limits
    assert (limits.body_bytes, limits.body_depth) == (1024 * 1024, 10)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot = 1", "prot: unknown setting; did you mean 'port'?"),
        ("port = 70000", "port: input should be less than or equal to 65535 (given: '70000')"),
        ('port = "eighty"', "port: input should be a valid integer, unable to parse"),
        ("[limits]\nbody_byte = 5", "limits.body_byte: unknown setting; did you mean 'body_bytes'?"),
        ("[limits]\nbody_depth = 1", "limits.body_depth: input should be greater than or equal to 4"),
        (
            '[[engines]]\nname = "a"\nmodel = "b"\nruner = "pooling"',
            "engines.0.runer: unknown setting; did you mean 'runner'?",
        ),
        ('[[engines]]\nname = "a"', "engines.0.model: field required"),
        ('[[engines]]\nname = "a b"\nmodel = "x"', "engines.0.name: string should match pattern"),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\n[[engines]]\nname = "a"\nmodel = "y"',
            "engines: the name 'a' is given twice",
        ),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\n[[engines]]\nname = "b"\nmodel = "y"\naliases = ["c", "a"]',
            "engines: the name 'a' is given twice",
        ),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\naliases = ["b", "b"]',
            "engines: the name 'b' is given twice",
        ),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\naliases = ["b c"]',
            "engines.0.aliases.0: string should match",
        ),
        ('[[engines]]\nname = "a-*"\nmodel = "x"', "engines.0.name: string should match pattern"),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\naliases = ["c-*"]\n[[engines]]\nname = "b"\nmodel = "y"\n'
            'aliases = ["c-*"]',
            "engines: the name 'c-*' is given twice",
        ),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\ndefault = true\n[[engines]]\nname = "b"\nmodel = "y"\n'
            "default = true",
            "engines 'b': `default = true` is set for 'a' already",
        ),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\nidle_s = 5',
            "engines 'a': `idle_s` is for engines with `start = \"on_demand\"`",
        ),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\nstart = "on_demand"\npin = true\nidle_s = 5',
            "engines 'a': `pin` and `idle_s` contradict each other",
        ),
        (
            '[on_demand]\nbudget = "1GiB"\n[[engines]]\nname = "a"\nmodel = "x"\nmemory = "2GiB"',
            "engines 'a': memory: 2.0GiB is more than all of `on_demand.budget`, which is 1.0GiB",
        ),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\nfallback = ["a"]',
            "engines 'a': fallback: it leads back to 'a': a -> a",
        ),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\nfallback = ["b"]\n'
            '[[engines]]\nname = "b"\nmodel = "x"\nfallback = ["c"]\n'
            '[[engines]]\nname = "c"\nmodel = "x"\nfallback = ["a"]',
            "engines 'a': fallback: it leads back to 'a': a -> b -> c -> a",
        ),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\ngroup = "g"\nfallback = ["g"]',
            "engines 'a': fallback: it leads back to 'a': a -> g",
        ),
        (
            '[[engines]]\nname = "alpha"\nmodel = "x"\nfallback = ["alhpa"]',
            "engines 'alpha': fallback: there is no engine or group 'alhpa'; did you mean 'alpha'?",
        ),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\nfallback = ["b"]\n'
            '[[engines]]\nname = "b"\nmodel = "x"\nrunner = "pooling"',
            "engines 'a': fallback: 'b' has another runner",
        ),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\ngroup = "b"\n[[engines]]\nname = "b"\nmodel = "x"',
            "engines 'a': group 'b' is the name of a model",
        ),
        ("engines = []", "engines: name at least one"),
        (
            '[[engines]]\nname = "a"\nmodel = "x"\nlatent = true',
            "engines 'a': `latent = true` needs `handoff = true`",
        ),
        ('log_level = "loud"', "log_level: input should be 'debug', 'info', 'warning' or 'error'"),
        ('cpu_threads = "all of them"', "cpu_threads: string should match pattern"),
        ("port = ", "not valid TOML"),
        ("[auth]\nkeys = []", "auth.keys: unknown setting; did you mean 'keys_file'?"),
        ("[metrics]\nport = -1", "metrics.port: input should be greater than or equal to 0"),
        ("drain_timeout_s = -1", "drain_timeout_s: input should be greater than or equal to 0"),
    ],
)
def test_a_wrong_value_is_one_readable_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(write(tmp_path, text))
    assert reason in caught.value.message
    assert len(caught.value.message.splitlines()) == 1
    assert caught.value.exit_code == 2


def groups() -> dict[str, list[str]]:
    """Every table of the settings file, with the keys it has."""
    keys = {}
    for name, field in Settings.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Frozen):
                keys[name] = list(kind.model_fields)
    return keys


GROUPS = groups()


@each("setting", [(group, key) for group, keys in GROUPS.items() for key in keys])
def test_a_misspelt_key_of_any_table_is_answered_with_the_key_that_was_meant(
    tmp_path: Path, setting: tuple[str, str]
) -> None:
    group, key = setting
    misspelt = f"{key}x"
    if group == "engines":
        config = write(tmp_path, f'[[engines]]\nname = "a"\nmodel = "b"\n{misspelt} = 1')
    else:
        config = write(tmp_path, f"[{group}]\n{misspelt} = 1")
    with pytest.raises(SettingsError) as caught:
        load_settings(config)
    where = f"{group}.0" if group == "engines" else group
    assert f"{where}.{misspelt}: unknown setting; did you mean '{key}'?" in caught.value.message.splitlines()


def test_every_table_of_the_settings_is_looked_at() -> None:
    assert {"auth", "limits", "images", "edge", "handoffs", "engines"} <= set(GROUPS)


WRONG = ("", "no such thing", "-1", "1e99", "nan", "0x10", "{", "\x1b[31m\r\nport = 1", "x" * 10_000)
TAKE_ANY_TEXT = ("HOST", "FOLDER", "DIR", "FILE", "STORE", "PATH", "ROOT", "LABEL", "UDS")


@each("variable", variables())
@pytest.mark.fault("H5")
def test_every_wrong_value_of_every_setting_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    errors = []
    with monkeypatch.context() as environment:
        for value in WRONG:
            environment.setenv(variable, value)
            try:
                load_settings()
            except SettingsError as error:
                errors.append(error)
    refused = len(errors)
    assert {error.exit_code for error in errors} <= {2}
    assert all(error.message.isprintable() and len(error.message) < 600 for error in errors), errors
    assert refused >= 3 or any(word in variable for word in TAKE_ANY_TEXT), (
        f"{refused} of {len(WRONG)} refused"
    )


@pytest.mark.fault("H5")
def test_a_wrong_setting_ends_the_gateway_with_one_line_and_code_2(tmp_path: Path) -> None:
    config = write(tmp_path, "[limits]\nbody_byte = 5")
    command = [str(Path(sys.executable).parent / "baton"), "serve", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "limits.body_byte: unknown setting; did you mean 'body_bytes'?" in line
    print(f"H5: exit 2, {line!r}")


def test_every_wrong_value_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(write(tmp_path, 'prot = 1\nlog_level = "loud"'))
    assert len(caught.value.message.splitlines()) == 2


def test_an_unknown_variable_is_refused_with_the_nearest_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PROT", "1")
    with pytest.raises(SettingsError, match="BATON_PROT: unknown setting; did you mean 'BATON_PORT'"):
        load_settings()


def test_a_missing_file_that_was_named_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        load_settings(tmp_path / "nowhere.toml")


def test_settings_cannot_be_changed_once_read() -> None:
    settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1


def test_a_home_folder_is_written_as_people_write_it() -> None:
    settings = load_settings(models_dir="~/models", auth={"keys_file": "~/keys.json"})
    assert settings.models_folder == Path.home() / "models"
    assert settings.keys_file == Path.home() / "keys.json"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("example.org", False),
    ],
)
def test_loopback_is_recognised(host: str, loopback: bool) -> None:
    assert load_settings(host=host).loopback is loopback


def test_every_setting_has_a_variable_and_a_description() -> None:
    assert "BATON_LIMITS__BODY_BYTES" in variables()
    for name, field in Settings.model_fields.items():
        group = getattr(field.annotation, "model_fields", None)
        for key, inner in (group or {name: field}).items():
            assert inner.description, f"{name}.{key} has no description"

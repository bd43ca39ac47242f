"""A text model and a vision part become one folder in LLaVA's layout, tensor by tensor what they were."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from baton.errors import StartError
from baton.models.catalog import EMBEDDED, LOOK_TINY, EmbeddedModel
from baton.models.store import INDEX, TEXT_SHARD, VISION_SHARD, ModelStore, join


def safetensors(**tensors: bytes) -> bytes:
    """A file of uint8 vectors."""
    header, at = {}, 0
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensors.values())


def tensors_of(file: Path) -> dict[str, bytes]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    data = content[8 + length :]
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    return {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}


@pytest.fixture
def vision(tmp_path: Path) -> Path:
    folder = tmp_path / "site" / "seeing_package" / "look"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (folder / "model.safetensors").write_bytes(
        safetensors(**{"vision_tower.a": b"tower", "projector.b": b"p"})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "image_token_index": 3}))
    (folder / "processor_config.json").write_text(json.dumps({"image_token": "<image>"}))
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "text_package"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(safetensors(**{"model.embed": b"words", "model.norm": b"nn"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>"}))
    added = [{"id": 2, "content": "<e>"}, {"id": 3, "content": "<spare>"}]
    vocabulary = {"<e>": 2, "<spare>": 3, "a": 4}
    tokenizer = {"added_tokens": added, "model": {"vocab": vocabulary}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_every_tensor_is_there_under_its_official_name(vision: Path, text: Path, tmp_path: Path) -> None:
    """Bytes as they were; the index says in which file."""
    join(vision, text, tmp_path / "out")
    found = {
        TEXT_SHARD: tensors_of(tmp_path / "out" / TEXT_SHARD),
        VISION_SHARD: tensors_of(tmp_path / "out" / VISION_SHARD),
    }
    assert found[TEXT_SHARD] == {"language_model.model.embed": b"words", "language_model.model.norm": b"nn"}
    assert found[VISION_SHARD] == {"vision_tower.a": b"tower", "projector.b": b"p"}
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"] == {name: shard for shard, of_it in found.items() for name in of_it}
    assert index["metadata"]["total_size"] == 5 + 2 + 5 + 1


def test_the_tensors_begin_at_a_multiple_of_eight(vision: Path, text: Path, tmp_path: Path) -> None:
    """A file mapped into memory is read without copying only where its tensors are aligned."""
    join(vision, text, tmp_path / "out")
    length = int.from_bytes((tmp_path / "out" / TEXT_SHARD).read_bytes()[:8], "little")
    assert length % 8 == 0


def test_the_spare_token_has_become_the_placeholder(vision: Path, text: Path, tmp_path: Path) -> None:
    """In the tokenizer's added tokens and its vocabulary, and nothing else there has changed."""
    join(vision, text, tmp_path / "out")
    tokenizer = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert tokenizer["added_tokens"] == [{"id": 2, "content": "<e>"}, {"id": 3, "content": "<image>"}]
    assert tokenizer["model"]["vocab"] == {"<e>": 2, "<image>": 3, "a": 4}
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<e>"
    assert settings["image_token"] == "<image>"


def test_the_text_models_configuration_is_inside(vision: Path, text: Path, tmp_path: Path) -> None:
    """As the text model was prepared."""
    join(vision, text, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "llava", "image_token_index": 3, "text_config": {"model_type": "llama"}}


@pytest.fixture
def joined(vision: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """An embedded model of the two; the text model is one that lies in its package as it is."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (text / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(text.parent))

    def sha(file: Path) -> str:
        return hashlib.sha256(file.read_bytes()).hexdigest()

    of_text = dataclasses.replace(
        LOOK_TINY, name="text", package="text_package", source="model.safetensors", as_is=True, text_model=None,
        source_sha256=sha(text / "model.safetensors"),
    )  # fmt: skip
    monkeypatch.setitem(EMBEDDED, "text", of_text)
    return dataclasses.replace(
        LOOK_TINY, name="seeing", package="seeing_package", source="look/model.safetensors", text_model="text",
        source_sha256=sha(vision / "model.safetensors"),
    )  # fmt: skip


def test_a_joined_model_is_prepared_once_and_found_again(
    joined: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there and whole is not written again."""
    store = ModelStore(tmp_path / "prepared")
    folder = store.prepare(joined)
    assert store.is_ready(joined)
    monkeypatch.setattr("baton.models.store.join", None)  # a second joining would fail
    assert store.prepare(joined) == folder


@pytest.mark.parametrize("name", ["chat_template.jinja", "config.json", "preprocessor_config.json"])
def test_another_description_makes_it_anew(
    joined: EmbeddedModel, vision: Path, tmp_path: Path, name: str
) -> None:
    """A release that changes the template, not the weights, is not served with the old one."""
    store = ModelStore(tmp_path / "prepared")
    store.prepare(joined)
    (vision / name).write_text((vision / name).read_text() + " ")
    assert not store.is_ready(joined)
    store.prepare(joined)
    assert store.is_ready(joined)


def test_parts_that_do_not_fit_are_one_readable_line(
    joined: EmbeddedModel, vision: Path, tmp_path: Path
) -> None:
    """A token that the text model's tokenizer does not have cannot be the placeholder."""
    (vision / "config.json").write_text(json.dumps({"image_token_index": 99}))
    with pytest.raises(StartError, match="do not fit together"):
        ModelStore(tmp_path / "prepared").prepare(joined)

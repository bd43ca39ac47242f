"""Join a text model and a vision part into one folder in the layout of LLaVA checkpoints.

The tensors are copied as they are; only their names change, so no tensor library is needed.
Source of the file format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

TEXT_SHARD, VISION_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
# The package's descriptions, which are copied unchanged.
DESCRIPTIONS = ("preprocessor_config.json", "processor_config.json", "chat_template.jinja")
PREFIX = "language_model."
HEADER_LENGTH_BYTES = 8


def join(vision: Path, text: Path, folder: Path) -> None:
    """Write a LLaVA model to `folder`.

    Args:
        vision: folder with tower and projector in model.safetensors, a config.json without `text_config`,
            and `DESCRIPTIONS`.
        text: folder of the prepared text model.
        folder: made by this function.

    Raises:
        OSError: a file is missing or cannot be written.
        ValueError: a file does not have the expected content.
    """
    folder.mkdir(parents=True)
    config = _read(vision / "config.json") | {"text_config": _read(text / "config.json")}
    _write(folder / "config.json", config)
    for name in DESCRIPTIONS:
        shutil.copyfile(vision / name, folder / name)
    image = _read(vision / "processor_config.json")["image_token"]
    _join_tokenizers(text, folder, int(config["image_token_index"]), str(image))
    shutil.copyfile(text / "generation_config.json", folder / "generation_config.json")
    shutil.copyfile(vision / WEIGHTS, folder / VISION_SHARD)
    sizes = _renamed(text / WEIGHTS, folder / TEXT_SHARD)
    _write_index(folder, sizes)


def _join_tokenizers(text: Path, folder: Path, token: int, image: str) -> None:
    """Write the text model's tokenizer with one special token renamed to the image placeholder."""
    tokenizer = _read(text / "tokenizer.json")
    (added,) = [entry for entry in tokenizer["added_tokens"] if entry["id"] == token]
    vocabulary = tokenizer["model"]["vocab"]
    if vocabulary.pop(added["content"], None) is not None:
        vocabulary[image] = token
    added["content"] = image
    _write(folder / "tokenizer.json", tokenizer)
    settings = _read(text / "tokenizer_config.json")
    _write(
        folder / "tokenizer_config.json",
        settings | {"image_token": image, "processor_class": "LlavaProcessor"},
    )


def _renamed(source: Path, target: Path) -> int:
    """Copy a safetensors file with `PREFIX` before every tensor's name.

    Returns:
        Bytes of its tensors.
    """
    with source.open("rb") as read, target.open("wb") as written:
        header = json.loads(read.read(int.from_bytes(read.read(HEADER_LENGTH_BYTES), "little")))
        named = {name if name == "__metadata__" else PREFIX + name: entry for name, entry in header.items()}
        text = json.dumps(named, separators=(",", ":")).encode()
        text += b" " * (-len(text) % HEADER_LENGTH_BYTES)  # so that the tensors stay aligned
        written.write(len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text)
        shutil.copyfileobj(read, written, 1 << 22)
    return _bytes_of(header)


def _write_index(folder: Path, text_bytes: int) -> None:
    """Write which tensor is in which file, for HuggingFace's loader."""
    with (folder / VISION_SHARD).open("rb") as file:
        vision = json.loads(file.read(int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")))
    with (folder / TEXT_SHARD).open("rb") as file:
        text = json.loads(file.read(int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")))
    places = dict.fromkeys(text, TEXT_SHARD) | dict.fromkeys(vision, VISION_SHARD)
    places.pop("__metadata__", None)
    total = text_bytes + _bytes_of(vision)
    _write(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _bytes_of(header: dict[str, Any]) -> int:
    spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    return sum(end - begin for begin, end in spans)


def _read(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} holds no JSON object")
    return found


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")

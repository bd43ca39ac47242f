"""The demo with pictures: a scene, its mask, its description, and two agents who go on from what was seen."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.table import Table

from baton.config.settings import load_settings
from baton.errors import OperatorError
from baton.telemetry.progress import PhaseProgress
from examples.demo.client import ANSWER_WITHIN_S, Answer, Json, ask, headers_of, reason_of
from examples.demo.display import first_token
from examples.demo.gateway import HEAD, OwnGateway, own_gateway

MAPPER, LOOKER = "flood-tiny", "look-tiny"
ENCODED = "baton_images_encoded_total"
FILES = ("mask.tif", "preview.png")
SCENE = ("-m", "training.flood_scenes.scene")
SEED, SIZE = 9107, 512  # which made-up scene, and its height and width in pixels
MAX_TOKENS = 48
WATCHER = ("watcher", "Describe the picture.")
OTHERS = (("hydrologist", "Is there water in the picture?"), ("pilot", "Do you see clouds?"))
INTRODUCTION = (
    "A satellite scene and three agents. One model maps the water in it; another looks at the map, and a "
    "watcher asks it for a description. A hydrologist and a pilot go on from the watcher's context at the "
    "same time: what the picture is to the model was computed once."
)
CLOSING = "The preview is described by a model with 139 million parameters that has seen made-up images only."
# float32, so that a prompt's answer does not depend on how much of it was prefilled at a time.
CONFIG = (
    HEAD
    + """\
[[engines]]
name = "look-tiny"
model = "look-tiny"
handoff = true
kv_cache_memory = "256MiB"
args = {{ dtype = "float32", enable_prefix_caching = false }}

[[engines]]
name = "flood-tiny"
model = "flood-tiny"
runner = "pooling"
"""
)


@dataclass(frozen=True)
class Mapped:
    """What the mapping model made of the scene.

    Attributes:
        preview: the picture with its legend, PNG.
        areas: `name: share` of each class.
    """

    preview: bytes
    areas: list[str]


def run(out: Path | None) -> None:
    """Show the demo on a gateway of its own.

    Args:
        out: folder for the scene, the mask and the picture; None: they are not kept.

    Raises:
        OperatorError: why it could not be shown to its end.
    """
    if importlib.util.find_spec("rasterio") is None:
        raise OperatorError("The demo maps a GeoTIFF: pip install 'vllm-baton[geo]'.")
    asyncio.run(_shown(Console(highlight=False), out))


async def _shown(console: Console, out: Path | None) -> None:
    console.print(INTRODUCTION, markup=False)
    console.print("\nFirst a gateway with two engines is started; that takes most of a minute.", markup=False)
    with tempfile.TemporaryDirectory(prefix="baton-scene-") as scratch:
        folder = out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        await _draw_scene(folder / "scene.tif")
        with PhaseProgress(sys.stdout) as progress:
            async with (
                own_gateway(load_settings(), progress, CONFIG) as gateway,
                _client(gateway.url) as client,
            ):
                progress.close()
                await Look(console, client, gateway, folder).show()
    if out is not None:
        console.print(f"The scene, the mask and the picture are in {out}.", markup=False)


@contextlib.asynccontextmanager
async def _client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    # trust_env: a proxy of this machine's would be asked for 127.0.0.1 too.
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_WITHIN_S, trust_env=False) as client:
        yield client


async def _draw_scene(target: Path) -> None:
    """Draw one of the made-up scenes that the model was tested with, in a process of its own."""
    command = (*SCENE, str(target), "--seed", str(SEED), "--size", str(SIZE))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, told = await process.communicate()
    if process.returncode:
        last = (told.decode(errors="replace").strip().splitlines() or ["no reason"])[-1]
        raise OperatorError(f"The scene could not be drawn: {last}")


class Look:
    """The demo on a running gateway.

    Args:
        console: where it is shown.
        client: of the gateway.
        gateway: where its metrics are, and the API key.
        folder: holds scene.tif; for the mask and the picture.
    """

    def __init__(
        self, console: Console, client: httpx.AsyncClient, gateway: OwnGateway, folder: Path
    ) -> None:
        self._console = console
        self._client = client
        self._metrics_url = gateway.metrics_url
        self._key = gateway.keys["handoff"]
        self._folder = folder

    async def show(self) -> None:
        """Map the scene, describe the map, ask on.

        Raises:
            OperatorError: a request failed.
        """
        mapped = await self._map((self._folder / "scene.tif").read_bytes())
        self._say(f"\n{MAPPER} maps the scene: {', '.join(mapped.areas)}")
        before = await self._encoded()
        watched = await self._ask(*WATCHER, picture=mapped.preview)
        after = [self._ask(*other, source=watched.handoff) for other in OTHERS]
        others = list(await asyncio.gather(*after))
        runs = await self._encoded() - before
        self._console.print()
        self._console.print(table([watched, *others]))
        self._say(f"Pictures that {LOOKER} encoded for these {1 + len(OTHERS)} agents: {runs:.0f}.")
        self._say(CLOSING)

    async def _map(self, scene: bytes) -> Mapped:
        path = f"/pooling?model={MAPPER}&outputs=mask,preview"
        headers = headers_of(self._key) | {"Content-Type": "image/tiff", "Accept": "application/json"}
        try:
            response = await self._client.post(path, headers=headers, content=scene)
        except httpx.HTTPError as error:
            raise OperatorError(f"No answer from {MAPPER}: {str(error) or type(error).__name__}.") from None
        if response.status_code != httpx.codes.OK:
            raise OperatorError(f"{MAPPER}: {reason_of(response.content)}")
        data = response.json()["data"]
        mask, preview = (base64.b64decode(text) for text in (data["data"], data["files"][0]["data"]))
        for name, content in zip(FILES, (mask, preview), strict=True):
            (self._folder / name).write_bytes(content)
        return Mapped(preview, [f"{area['name']} {area['share']:.0%}" for area in data["classes"]])

    async def _ask(
        self, agent: str, question: str, *, picture: bytes | None = None, source: str | None = None
    ) -> Answer:
        content: list[Json] = [{"type": "text", "text": question}]
        if picture is not None:
            url = "data:image/png;base64," + base64.b64encode(picture).decode()
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        body: Json = {
            "model": LOOKER,
            "max_tokens": MAX_TOKENS,
            "messages": [{"role": "user", "content": content if picture is not None else question}],
            "handoff": {"save": True} if source is None else {"from": source},
        }
        answer = await ask(self._client, agent, body, self._key, _unheard)
        self._say(f"  {agent} asks: {question}\n  {agent}: {' '.join(answer.text.split())}")
        return answer

    async def _encoded(self) -> float:
        """How many pictures the engine has encoded since it started."""
        response = await self._client.get(self._metrics_url)
        if response.status_code != httpx.codes.OK:
            raise OperatorError("The gateway's metrics cannot be read.")
        return encoded_by(response.text, LOOKER)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def encoded_by(metrics: str, engine: str) -> float:
    """What `baton_images_encoded_total` says of an engine in the text of `/metrics`."""
    families = text_string_to_metric_families(metrics)
    samples = [sample for family in families for sample in family.samples if sample.name == ENCODED]
    return sum(sample.value for sample in samples if sample.labels.get("engine") == engine)


def table(answers: list[Answer]) -> Table:
    """What each agent's answer took."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("agent", "prompt tokens", "prefilled", "first token", "context"):
        drawn.add_column(name, justify="left" if name == "agent" else "right")
    for answer in answers:
        counts = f"{answer.prompt_tokens:,}", f"{answer.prefilled_tokens:,}"
        took = first_token(answer).removeprefix("first token ")
        drawn.add_row(answer.agent, *counts, took, answer.outcome or "computed")
    return drawn


def _unheard(_text: str) -> None:
    """The answers are shown when they are whole."""

"""The IO processor `baton_geo`: turn a scene into prompts of a few tiles each, and their outputs into a mask.

vLLM's own server and offline `encode` call the synchronous hooks. Servers that await the asynchronous hooks
get tiles only as the engine takes them, so that memory stays bounded at any size of scene. The state of
requests is in `scenes.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vllm.config import VllmConfig
from vllm.entrypoints.pooling.pooling.protocol import IOProcessorResponse
from vllm.outputs import PoolingRequestOutput
from vllm.plugins.io_processors.interface import IOProcessor
from vllm.renderers import BaseRenderer

from baton_geo.card import Card
from baton_geo.contract import (
    LASTING,
    LASTING_VALUES,
    LASTING_VECTORS,
    AnyGeoRequest,
    GeoAnswer,
    GeoOptions,
    GeoRequest,
    UploadRequest,
    geo_request,
    options_of_query,
)
from baton_geo.errors import RasterTooLarge, RequestInvalid
from baton_geo.inputs import Inputs, open_inputs, open_inputs_sync
from baton_geo.prithvi import PrithviConfig, card_of
from baton_geo.raster.decoders import Decoders
from baton_geo.raster.messages import FILES, SceneRequest
from baton_geo.raster.pixels.bands import require_one_a_band
from baton_geo.raster.pixels.calibration import each_band
from baton_geo.scenes import Coordinates, FinishedScene, RunningScene, RunningScenes, prompt
from baton_geo.settings import geo_settings
from baton_geo.sources import Sources
from baton_geo.spool import Spooled, prepare_folder

Result = TypeVar("Result")


PluginRequest = AnyGeoRequest | UploadRequest
Raster = Spooled | Inputs
CLASS_OUTPUTS: tuple[str, ...] = tuple(output for output in FILES if output not in ("value", "embeddings"))
VALUE_OUTPUTS = ("value", "preview", "scene", "classes")
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")
VECTOR_OUTPUTS = ("embeddings", "scene")
TITLES = {
    "mask": "Class of each pixel",
    "probabilities": "Probability of each class",
    "preview": "Picture of the result over the scene",
    "polygons": "Polygons of the classes",
    "geopackage": "The same polygons as a GeoPackage",
    "style": "Style of the mask for QGIS",
    "item": "STAC item of the files",
    "embeddings": "Vector of each patch",
}
"""What each output is that lasts; a regression's `value` has its name from the card."""


@dataclass(frozen=True)
class Prepared:
    """A request that the gateway changed for what it does with the answer.

    Attributes:
        shown: it gets a preview whatever its outputs are, because its result is described to a model.
        if_few: polygons are left out where there are too many, because it names no outputs.
    """

    request: PluginRequest
    shown: bool = False
    if_few: bool = False


class GeoProcessor(IOProcessor[PluginRequest | Prepared, GeoAnswer]):
    """The plugin; see the module.

    Args:
        vllm_config: of the engine; the model's config.json has the card, `additional_config` the operator's
            settings.

    Raises:
        ValueError: a setting is wrong, or the model's config.json has no card.
    """

    can = ("map",)
    """For clients that look for an engine that draws maps."""
    prompts_at_once = 2
    """Prompts of a request in the engine: a strip is computed while the next one waits."""

    def __init__(self, vllm_config: VllmConfig, renderer: BaseRenderer) -> None:
        super().__init__(vllm_config, renderer)
        hf_config = vllm_config.model_config.hf_config.to_dict()
        self._card = with_fingerprint(card_of(hf_config), hf_config, vllm_config.model_config)
        self._lasting = LASTING if self._card.value is None else LASTING_VALUES
        if self._card.embedding is not None:
            self._lasting = LASTING_VECTORS
        self._coordinates = Coordinates(PrithviConfig.from_hf(hf_config))
        self._settings = geo_settings(vllm_config.additional_config)
        prepare_folder(self._settings.spool)
        self._sources = Sources(self._settings)
        self._decoders = Decoders(
            self._settings.decoders, self._settings.decoder_wait_s, self._settings.spool
        )
        self._scenes = RunningScenes(self._settings.limits.seconds)
        weakref.finalize(self, self._scenes.close)  # also at the end of the process
        self._open_threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "geo-open")
        # A host that is slow to send ranges holds half of the decoders at most, and no thread of the above.
        self._range_threads = ThreadPoolExecutor(max(1, self._settings.decoders // 2), "geo-range")
        self._tile_threads = ThreadPoolExecutor(2 * self._settings.decoders, "geo-tile")

    def parse_data(self, data: object) -> PluginRequest:
        return geo_request(data)

    def parse_upload(
        self, file: Path, media_type: str, query: Mapping[str, str], accept: Sequence[str]
    ) -> PluginRequest:
        """Take an uploaded file; its bytes decide its format, not `media_type`.

        Args:
            file: the upload; the server removes it.
            media_type: of the request; ignored.
            accept: media types the client accepts; they decide the outputs if the options have none.

        Raises:
            RequestInvalid: an option is unknown or wrong.
        """
        return UploadRequest(file, options_of_query(query, accept))

    def for_files(self, data: PluginRequest) -> PluginRequest | Prepared:
        """Ask for every output that lasts, if the request names none."""
        wider = {"outputs": self._lasting}
        options = data.options if isinstance(data, UploadRequest) else data
        if "outputs" in options.model_fields_set:
            return data
        if isinstance(data, UploadRequest):
            data = UploadRequest(data.file, data.options.model_copy(update=wider))
        else:
            data = data.model_copy(update=wider)
        return Prepared(data, if_few=True)

    @property
    def lasting(self) -> dict[str, tuple[str, str, str]]:
        """Title, file name and media type of each output that `for_files` asks for."""
        titles = TITLES
        if self._card.value is not None:
            name, unit = self._card.value.name, self._card.value.unit
            title = f"{name[:1].upper()}{name[1:]} of each pixel"
            titles = TITLES | {"value": f"{title}, {unit}" if unit else title}
        return {output: (titles[output], *FILES[output]) for output in self._lasting}

    def progress(self, request_id: str) -> dict[str, int]:
        """Count a running request's tiles, those of them that are done, and the bytes fetched."""
        for running in self._scenes.of_request(request_id):
            fetched = running.raster.fetched()
            return {
                "tiles": running.scene.info.tiles,
                "tiles_done": running.scene.tiles_done,
                "bytes_fetched": 0 if fetched is None else fetched.bytes,
            }
        return {}

    def for_description(self, data: PluginRequest) -> Prepared:
        """Ask for a preview too, for `describe`."""
        return Prepared(data, shown=True)

    async def pre_process_async(
        self, prompt: PluginRequest | Prepared, request_id: str | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        prepared, options = self._checked(prompt)
        request = prepared.request
        if isinstance(request, UploadRequest):
            raster: Raster = Spooled(request.file)
        elif isinstance(request, GeoRequest) and not request.partial:
            raster = await self._sources.open(request)
        else:
            raster = await open_inputs(self._sources, request, self._card)
        # Opening may wait for a free decoder, so it must not hold the threads that open scenes need. It also
        # takes processor time: opened one after the other, the first scenes reach the engine sooner.
        ranged = isinstance(raster, Inputs) and raster.ranged
        threads = self._range_threads if ranged else self._open_threads
        opening = _in_threads(threads, self._open, raster, prepared, options, request_id)
        try:
            running = await asyncio.shield(opening)
        except asyncio.CancelledError:
            if isinstance(raster, Inputs):
                raster.stop()
            await asyncio.wait({opening})
            if opening.exception() is None:
                await _in_threads(self._tile_threads, self._scenes.drop, opening.result())
            raise
        return self._prompts(running)

    async def _prompts(self, running: RunningScene) -> AsyncGenerator[dict[str, Any], None]:
        fields, empty = self._fields(running), True
        info = running.scene.info
        for first in range(0, info.tiles, info.strip):
            tiles, strip = await _in_threads(self._tile_threads, running.scene.read, first, info.strip)
            if tiles:
                empty = False
                yield prompt(self._scenes.serial(running, tiles), strip, info, fields)
        if empty:
            await _in_threads(self._tile_threads, running.scene.finish)  # says that every pixel is nodata

    def pre_process(
        self, prompt: PluginRequest | Prepared, request_id: str | None = None, **kwargs: Any
    ) -> Sequence[dict[str, Any]]:
        prepared, options = self._checked(prompt)
        request = prepared.request
        if isinstance(request, UploadRequest):
            raster: Raster = Spooled(request.file)
        elif isinstance(request, GeoRequest) and not request.partial:
            raster = self._sources.open_sync(request)
        else:
            raster = open_inputs_sync(self._sources, request, self._card)
        running = self._open(raster, prepared, options, request_id)
        try:
            prompts = self._all_prompts(running)
        except BaseException:
            self._scenes.drop(running)
            raise
        # vLLM's server calls this on its event loop: a call that waits for a place blocks all.
        running.scene.release_place()
        return prompts

    def _all_prompts(self, running: RunningScene) -> list[dict[str, Any]]:
        info, most = running.scene.info, self._settings.limits.tiles_at_once
        if info.tiles > most:
            raise RasterTooLarge(
                f"The scene has {info.tiles} tiles; this server computes them all at once, and at most {most}"
                ". Cut the scene, or send it to a server that streams (Baton)."
            )
        fields = self._fields(running)
        read = (running.scene.read(first, info.strip) for first in range(0, info.tiles, info.strip))
        prompts = [
            prompt(self._scenes.serial(running, tiles), strip, info, fields) for tiles, strip in read if tiles
        ]
        if not prompts:
            running.scene.finish()  # says that every pixel is nodata
        return prompts

    def _checked(self, prompt: PluginRequest | Prepared) -> tuple[Prepared, GeoOptions]:
        """Check what the card alone decides, before a file is fetched; return the request and its options.

        Raises:
            RequestInvalid: outputs, or numbers of bands or dates, are not this model's.
        """
        prepared = prompt if isinstance(prompt, Prepared) else Prepared(prompt)
        request = prepared.request
        options = self._with_outputs(request.options if isinstance(request, UploadRequest) else request)
        if options.indices is not None:
            require_one_a_band(self._card, options.indices)
        for name, neutral in ("scale", 1.0), ("offset", 0.0):
            each_band(self._card, name, getattr(options, name), neutral)
        self._coordinates.require_dates(options)
        return prepared, options

    def _open(
        self, raster: Raster, prepared: Prepared, options: GeoOptions, request_id: str | None
    ) -> RunningScene:
        inputs = raster if isinstance(raster, Inputs) else None
        preview = (prepared.shown and self._card.embedding is None) or "preview" in options.outputs
        asked = SceneRequest(
            card=self._card,
            limits=self._settings.limits,
            files=() if inputs is None else inputs.specs,
            window=options.window,
            bbox=options.bbox,
            bbox_crs=options.bbox_crs,
            indices=options.indices,
            scale=options.scale,
            offset=options.offset,
            sieve=options.sieve,
            if_few=prepared.if_few,
            name=request_id,
            date=options.dates[0].isoformat() if options.dates else None,
            **{output: output in options.outputs for output in FILES} | {"preview": preview},
        )
        try:
            paths = raster.path if isinstance(raster, Spooled) else raster.paths
            scene = self._decoders.open(paths, asked, inputs)
        except BaseException:
            raster.close()
            raise
        running = RunningScene(scene, options, request_id, raster, self._card.value)
        self._scenes.add(running)
        return running

    def _fields(self, running: RunningScene) -> dict[str, Any]:
        fields, running.notes = self._coordinates.of(running.options, running.scene.info)
        return fields

    def _with_outputs(self, options: GeoOptions) -> GeoOptions:
        """Refuse outputs that this kind of model does not give.

        The `mask` of a regression is its `value`, that of an encoder alone its `embeddings`; the latter's
        `preview` is the scene.
        """
        known, instead = CLASS_OUTPUTS, {}
        if self._card.value is not None:
            known, instead = VALUE_OUTPUTS, {"mask": "value"}
        if self._card.embedding is not None:
            known, instead = VECTOR_OUTPUTS, {"mask": "embeddings", "preview": "scene"}
        if instead:
            named = (instead.get(output, output) for output in options.outputs)
            options = options.model_copy(update={"outputs": tuple(dict.fromkeys(named))})
        for output in options.outputs:
            if output not in known:
                raise RequestInvalid(
                    f"data.outputs: {output} is not among what this model gives: {', '.join(known)}",
                    param="data.outputs",
                )
        return options

    async def post_process_async(
        self,
        model_output: AsyncIterator[tuple[int, PoolingRequestOutput]],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> FinishedScene:
        """Write the outputs as they arrive and finish the scene; its files stay until `forget`."""
        running = None
        async for _, output in model_output:
            running = await _in_threads(self._tile_threads, self._write, output)
        if running is None:
            raise ValueError("the engine returned no output")
        return await _in_threads(self._tile_threads, self._finish, running)

    def post_process(
        self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None, **kwargs: Any
    ) -> GeoAnswer:
        running = None
        try:
            for output in model_output:
                running = self._write(output)
            if running is None:
                raise ValueError("the engine returned no output")
            return self._finish(running).answer()
        finally:
            if running is not None:
                self._scenes.drop(running)

    def _write(self, output: PoolingRequestOutput) -> RunningScene:
        running, tiles = self._scenes.take(output.prompt_token_ids[0])
        scores = output.outputs.data.numpy()  # of as many tiles as the longest strip of the step has
        for tile, own in zip(tiles, scores[: len(tiles)], strict=True):
            running.scene.write(tile, own)
        return running

    def _finish(self, running: RunningScene) -> FinishedScene:
        products = running.scene.finish()
        running.scene.end_child()  # a client that reads slowly keeps the files, not a decoder
        return FinishedScene(running, products)

    def output_to_files(self, output: FinishedScene) -> list[tuple[str, str, Path]]:
        """List name, media type and path of each output."""
        return output.files()

    def left_out(self, output: FinishedScene) -> dict[str, str]:
        """Name the files that were not made though they were wanted, each with the note why."""
        return output.left_out()

    def output_to_response(self, output: FinishedScene) -> IOProcessorResponse[GeoAnswer]:
        """Make the JSON answer."""
        return IOProcessorResponse(request_id=output.running.request_id, data=output.answer())

    def describe(self, output: FinishedScene) -> tuple[str, tuple[str, Path] | None]:
        """Describe the scene to a model: the areas in one line, and media type and path of the preview."""
        return output.describe()

    def amounts(self, output: FinishedScene) -> dict[str, int]:
        """Count a finished scene's pixels, for a server's metrics."""
        info = output.running.scene.info
        return {"pixels": info.width * info.height}

    def close(self) -> None:
        """End every scene and raster process."""
        self._scenes.close()
        self._decoders.close()
        self._open_threads.shutdown(wait=False)
        self._range_threads.shutdown(wait=False)
        self._tile_threads.shutdown(wait=False)

    def forget(self, request_id: str) -> None:
        """Close a request's scene, finished or not, and remove its files."""
        for running in self._scenes.of_request(request_id):
            self._scenes.drop(running)


def with_fingerprint(card: Card, hf_config: Mapping[str, Any], model_config: Any) -> Card:
    """Give the card of an encoder alone the fingerprint of its configuration and weights, for its embeddings.

    The weights are read where they are files here; of a model by name its revision stands for them.
    """
    if card.embedding is None:
        return card
    described = [hf_config.get(key) for key in ("pretrained_cfg", "model_args", "train_params", "baton_geo")]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    folder = Path(str(getattr(model_config, "model", "")))
    files = sorted(path for path in folder.glob("*") if path.suffix in WEIGHTS) if folder.is_dir() else []
    for path in files:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    if not files:
        digest.update(f"{folder} {getattr(model_config, 'revision', None)}".encode())
    embedding = card.embedding.model_copy(update={"model": digest.hexdigest()})
    return card.model_copy(update={"embedding": embedding})


def _in_threads(threads: Executor, work: Callable[..., Result], *args: Any) -> asyncio.Future[Result]:
    return asyncio.get_running_loop().run_in_executor(threads, work, *args)

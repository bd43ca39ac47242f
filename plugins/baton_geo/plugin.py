"""The IO processor `baton_geo`: a scene in, prompts of one tile each, a georeferenced mask out.

It answers both to vLLM's own server and offline `encode`, which call the synchronous hooks, and to servers
that await the asynchronous ones, where tiles are cut only as the engine has room for them: then memory
stays bounded at any size of scene. Nothing of a request is kept here; see `scenes.py`.
"""

from __future__ import annotations

import asyncio
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

from baton_geo.answers import Finished
from baton_geo.contract import GeoAnswer, GeoOptions, GeoRequest, geo_request
from baton_geo.errors import RasterTooLarge
from baton_geo.prithvi import PrithviConfig
from baton_geo.queries import options_of_query
from baton_geo.raster.ask import SceneAsk
from baton_geo.raster.decoders import Decoders
from baton_geo.scenes import Running, Scenes
from baton_geo.settings import geo_settings
from baton_geo.sources import Sources
from baton_geo.spool import Spooled, prepare_folder
from baton_geo.tiles import Coordinates, card_of, prompt

Result = TypeVar("Result")


@dataclass(frozen=True)
class Upload:
    """A file sent as it is, with what was asked of it."""

    file: Path
    options: GeoOptions


Ask = GeoRequest | Upload


@dataclass(frozen=True)
class Shown:
    """A request whose answer will be shown to a model: it wants the preview, whatever its outputs are."""

    ask: Ask


class GeoProcessor(IOProcessor[Ask | Shown, GeoAnswer]):
    """See the module.

    Args:
        vllm_config: of the engine; its model's config.json holds the card, its `additional_config` the
            operator's settings.
        renderer: unused.

    Raises:
        ValueError: a wrong setting, or a model whose config.json says too little.
    """

    def __init__(self, vllm_config: VllmConfig, renderer: BaseRenderer) -> None:
        super().__init__(vllm_config, renderer)
        hf_config = vllm_config.model_config.hf_config.to_dict()
        self._card = card_of(hf_config)
        self._coordinates = Coordinates(PrithviConfig.from_hf(hf_config))
        self._settings = geo_settings(vllm_config.additional_config)
        prepare_folder(self._settings.spool)
        self._sources = Sources(self._settings)
        self._decoders = Decoders(
            self._settings.decoders, self._settings.decoder_wait_s, self._settings.spool
        )
        self._scenes = Scenes(self._settings.limits.seconds)
        weakref.finalize(self, self._scenes.close)  # at the end of the process too
        self._openers = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "geo-open")
        self._hands = ThreadPoolExecutor(2 * self._settings.decoders, "geo-tile")

    def parse_data(self, data: object) -> Ask:
        return geo_request(data)

    def parse_upload(
        self, file: Path, media_type: str, query: Mapping[str, str], accept: Sequence[str]
    ) -> Ask:
        """A file sent as it is. What it is, its bytes say, not `media_type`.

        Args:
            file: to be read, not kept.
            media_type: as the client says.
            query: the request's options as text.
            accept: the media types the answer may have; decides the outputs where the options do not.

        Raises:
            RequestInvalid: an option nobody knows, or a wrong one.
        """
        return Upload(file, options_of_query(query, accept))

    def for_description(self, data: Ask) -> Shown:
        """Return the same request, changed so that `describe` has a picture."""
        return Shown(data)

    async def pre_process_async(
        self, prompt: Ask | Shown, request_id: str | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        shown = isinstance(prompt, Shown)
        if isinstance(prompt, Shown):
            prompt = prompt.ask
        if isinstance(prompt, Upload):
            raster, options = _borrowed(prompt.file), prompt.options
        else:
            raster, options = await self._sources.open(prompt), prompt
        # Opening may wait for a decoder to be free: not in the threads that those at work need to get on. And
        # it is work for a processor: opened one after the other, the first scenes reach the engine sooner.
        opening = _in(self._openers, self._open, raster, options, request_id, shown)
        try:
            running = await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait({opening})
            if opening.exception() is None:
                await _in(self._hands, self._scenes.drop, opening.result())
            raise
        return self._prompts(running)

    async def _prompts(self, running: Running) -> AsyncGenerator[dict[str, Any], None]:
        fields, empty = self._fields(running), True
        for tile in range(running.scene.info.tiles):
            pixels = await _in(self._hands, running.scene.read, tile)
            if pixels is not None:
                empty = False
                yield prompt(self._scenes.serial(running, tile), pixels, fields)
        if empty:
            await _in(self._hands, running.scene.finish)  # says that every pixel is nodata

    def pre_process(
        self, prompt: Ask | Shown, request_id: str | None = None, **kwargs: Any
    ) -> Sequence[dict[str, Any]]:
        shown = isinstance(prompt, Shown)
        if isinstance(prompt, Shown):
            prompt = prompt.ask
        if isinstance(prompt, Upload):
            raster, options = _borrowed(prompt.file), prompt.options
        else:
            raster, options = self._sources.open_sync(prompt), prompt
        running = self._open(raster, options, request_id, shown)
        try:
            prompts = self._all_prompts(running)
        except BaseException:
            self._scenes.drop(running)
            raise
        # vLLM's server calls this on its event loop: waiting here for a place, none would ever become free.
        running.scene.step_aside()
        return prompts

    def _all_prompts(self, running: Running) -> list[dict[str, Any]]:
        tiles, most = running.scene.info.tiles, self._settings.limits.tiles_at_once
        if tiles > most:
            raise RasterTooLarge(
                f"The scene has {tiles} tiles; this server takes them all at once, and at most {most}. "
                "Cut the scene, or send it to a server that streams (Baton)."
            )
        fields = self._fields(running)
        read = ((tile, running.scene.read(tile)) for tile in range(tiles))
        prompts = [
            prompt(self._scenes.serial(running, tile), pixels, fields)
            for tile, pixels in read
            if pixels is not None
        ]
        if not prompts:
            running.scene.finish()  # says that every pixel is nodata
        return prompts

    def _open(self, raster: Spooled, options: GeoOptions, request_id: str | None, shown: bool) -> Running:
        ask = SceneAsk(
            card=self._card,
            limits=self._settings.limits,
            indices=options.indices,
            scale=options.scale,
            offset=options.offset,
            mask="mask" in options.outputs,
            probabilities="probabilities" in options.outputs,
            preview=shown or "preview" in options.outputs,
        )
        try:
            scene = self._decoders.open(raster.path, ask)
        except BaseException:
            raster.close()
            raise
        running = Running(scene, options, request_id, raster)
        self._scenes.add(running)
        return running

    def _fields(self, running: Running) -> dict[str, Any]:
        return self._coordinates.of(running.options, running.scene.info)

    async def post_process_async(
        self,
        model_output: AsyncIterator[tuple[int, PoolingRequestOutput]],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> Finished:
        """What `output_to_files` and `output_to_response` take; kept until `forget`."""
        running = None
        async for _, output in model_output:
            running = await _in(self._hands, self._write, output)
        if running is None:
            raise ValueError("no output came back")
        return await _in(self._hands, self._finish, running)

    def post_process(
        self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None, **kwargs: Any
    ) -> GeoAnswer:
        running = None
        try:
            for output in model_output:
                running = self._write(output)
            if running is None:
                raise ValueError("no output came back")
            return self._finish(running).answer()
        finally:
            if running is not None:
                self._scenes.drop(running)

    def _write(self, output: PoolingRequestOutput) -> Running:
        running, tile = self._scenes.take(output.prompt_token_ids[0])
        running.scene.write(tile, output.outputs.data.numpy())
        return running

    def _finish(self, running: Running) -> Finished:
        products = running.scene.finish()
        running.scene.dismiss()  # whoever reads the answer slowly keeps its files, and nobody's decoder
        return Finished(running, products)

    def output_to_files(self, output: Finished) -> list[tuple[str, str, Path]]:
        """Name, media type and path of each output."""
        return output.files()

    def output_to_response(self, output: Finished) -> IOProcessorResponse[GeoAnswer]:
        """The JSON answer."""
        return IOProcessorResponse(request_id=output.running.request_id, data=output.answer())

    def describe(self, output: Finished) -> tuple[str, tuple[str, Path] | None]:
        """Describe the scene for a model that is asked about it: the areas in a line, and the preview."""
        return output.describe()

    def amounts(self, output: Finished) -> dict[str, int]:
        """What a server may count of a finished scene."""
        info = output.running.scene.info
        return {"pixels": info.width * info.height}

    def close(self) -> None:
        """End every scene and raster process; for servers that say when they are done."""
        self._scenes.close()
        self._decoders.close()
        self._openers.shutdown(wait=False)
        self._hands.shutdown(wait=False)

    def forget(self, request_id: str) -> None:
        """Let go of a request's scene, whatever became of it."""
        for running in self._scenes.of_request(request_id):
            self._scenes.drop(running)


def _borrowed(file: Path) -> Spooled:
    """A file that is somebody else's to remove."""
    return Spooled(file, file.stat().st_size, owned=False)


def _in(threads: Executor, work: Callable[..., Result], *args: Any) -> asyncio.Future[Result]:
    return asyncio.get_running_loop().run_in_executor(threads, work, *args)

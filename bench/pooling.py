"""Scenes through Baton, through plain vLLM's server with the same plugin, and torch's forward of their tiles.

`make bench-pooling`, a quarter of an hour. All three are up at the same time; rounds alternate, so that a
machine whose speed drifts is fair to all, and all are started several times, as one engine may be a tenth
faster than the next for as long as it lives. Printed are medians, ratios within a launch and how far launches
are apart, how `/health` answered meanwhile, and memory. Requests are encoded before the clock runs.
`--light` takes a model of a fiftieth of the work, so that reading, cutting and blending are what is compared;
`--full` sends one whole Sentinel-2 tile (10,980 x 10,980, six bands) to Baton and watches its memory.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx
import numpy as np
import psutil
import rasterio
from rasterio import Affine
from rich.console import Console
from rich.progress import track
from servers import ENVIRONMENT, Server, free_port, machine

from baton.models.catalog import FLOOD_TINY
from baton.models.store import ModelStore
from baton_geo.raster.pixels.grid import Grid
from training.flood_scenes.scenes import make_scene

MODEL = "flood-tiny"
PLAIN = "plain vLLM, JSON"
BATCH = 8
BIG, SMALL, MANY = 2048, 512, 8
FULL = 10_980
PROBE_S = 0.01
SETTLE_S = 0.5  # threads of whoever worked last spin a little longer
BODY = "256MiB"


class Torch:
    """`torch_tiles.py` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        script = str(Path(__file__).parent / "torch_tiles.py")
        self._command = [sys.executable, script, str(folder), str(BATCH)]

    def __enter__(self) -> Torch:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        self._pipe().readline()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _pipe(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def seconds(self, tiles: int) -> float:
        """How long the forwards of so many tiles take."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{tiles}\n")
        self._process.stdin.flush()
        return float(self._pipe().readline())


def light_model(source: Path, folder: Path) -> Path:
    """The same architecture, bands and tiles as `source`, much narrower, with random weights."""
    script = f"""
import json, torch
from pathlib import Path
from safetensors.torch import save_file
from baton_geo.prithvi import PrithviConfig, PrithviSegmenter
described = json.loads(Path({str(source / "config.json")!r}).read_text())
described["pretrained_cfg"] |= {{"embed_dim": 32, "depth": 1, "num_heads": 2, "mlp_ratio": 2}}
described["pretrained_cfg"]["segmentation"] |= {{"channels": [16, 8, 8], "head_channels": [8], "skip": False}}
torch.manual_seed(0)
weights = PrithviSegmenter(PrithviConfig.from_hf(described)).state_dict()
folder = Path({str(folder)!r})
folder.mkdir()
(folder / "config.json").write_text(json.dumps(described))
save_file({{name: value.contiguous() for name, value in weights.items()}}, folder / "model.safetensors")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    return folder


def baton(folder: Path, model: Path) -> Server:
    """Baton with this model alone, as the shipped one is served."""
    config = folder / "pooling.toml"
    args = ", ".join(f"{key} = {json.dumps(value)}" for key, value in FLOOD_TINY.args.items())
    config.write_text(
        f'limits = {{ body_bytes = "{BODY}" }}\n'
        f'[[engines]]\nname = "{MODEL}"\nmodel = "{model}"\nrunner = "pooling"\nargs = {{ {args} }}\n'
    )
    port = free_port()
    command = [str(Path(sys.executable).parent / "baton"), "serve", "--config", str(config)]
    return Server("Baton", [*command, "--port", str(port)], f"http://127.0.0.1:{port}")


def plain_vllm(model: Path) -> Server:
    """vLLM's own server with the same plugin and engine settings."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--runner", "pooling"),
        *("--dtype", "float32", "--skip-tokenizer-init", "--enforce-eager", "--mm-processor-cache-gb", "0"),
        *("--max-num-seqs", str(FLOOD_TINY.args["max_num_seqs"]), "--kv-cache-memory-bytes", str(2**26)),
    ]
    return Server("plain vLLM", command, f"http://127.0.0.1:{port}")


def scene(size: int, seed: int, folder: Path) -> Path:
    """A made-up scene as a tiled GeoTIFF."""
    path = folder / f"scene-{size}-{seed}.tif"
    part = make_scene(seed, SMALL, SMALL).pixels
    repeats = -(-size // SMALL)
    pixels = np.tile(part, (1, repeats, repeats))[:, :size, :size]
    profile = {"driver": "GTiff", "width": size, "height": size, "count": len(pixels), "dtype": "int16"}
    profile |= {"tiled": True, "blockxsize": 512, "blockysize": 512, "compress": "deflate", "nodata": -9999}
    with rasterio.open(
        path, "w", crs="EPSG:32633", transform=Affine(10, 0, 5e5, 0, -10, 5e6), **profile
    ) as file:
        file.write(pixels)
    return path


def tiles_of(size: int, card: dict[str, int]) -> int:
    """Tiles a scene of `size` x `size` is cut into."""
    return len(Grid(size, size, card["tile"], card["overlap"]))


def as_json(path: Path) -> bytes:
    """As vLLM's own server takes it."""
    encoded = base64.b64encode(path.read_bytes()).decode()
    data = {"data": encoded, "data_format": "b64_json", "image_format": "tiff", "out_data_format": "b64_json"}
    return json.dumps({"model": MODEL, "data": data}).encode()


def timed(url: str, contents: list[bytes], media_type: str) -> float:
    """Seconds until all of them are answered, sent at once."""

    def post(content: bytes) -> None:
        headers = {"content-type": media_type}
        client.post(f"/pooling?model={MODEL}", content=content, headers=headers).raise_for_status()

    with httpx.Client(base_url=url, timeout=1800) as client, ThreadPoolExecutor(len(contents)) as pool:
        began = time.perf_counter()
        list(pool.map(post, contents))
        return time.perf_counter() - began


class Probe:
    """Asks `/health` all the time, and looks at the memory of the front end and its raster processes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.waits: list[float] = []
        self.peak_mib = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        over = threading.Event()
        threads = [threading.Thread(target=watch, args=(over,)) for watch in (self._ask, self._look)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _ask(self, over: threading.Event) -> None:
        with httpx.Client(base_url=self._server.url, timeout=60) as client:
            while not over.is_set():
                began = time.perf_counter()
                client.get("/health").raise_for_status()
                self.waits.append((time.perf_counter() - began) * 1000)
                time.sleep(PROBE_S)

    def _look(self, over: threading.Event) -> None:
        while not over.is_set():
            self.peak_mib = max(self.peak_mib, front_end_mib(self._server.process.pid))
            time.sleep(0.25)

    def row(self) -> str:
        """p50, p99, most, in milliseconds; peak memory in MiB."""
        p50, p99 = np.percentile(self.waits, [50, 99])
        return f"{p50:.1f} | {p99:.1f} | {max(self.waits):.0f} | {self.peak_mib:.0f}"


def front_end_mib(pid: int) -> float:
    """Proportional memory of a server's process and of its raster processes, without its engine's."""
    front = psutil.Process(pid)
    raster = [
        child
        for child in front.children(recursive=True)
        if "baton_geo.raster.fork_server" in " ".join(_words(child))
    ]
    return sum(_pss(process) for process in (front, *raster)) / 2**20


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _pss(process: psutil.Process) -> float:
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return float(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))) * 1024


class Comparison:
    """The same scenes every way, over several launches of the servers.

    Args:
        paths: the scenes.
        tiles: they are cut into.
    """

    def __init__(self, paths: list[Path], tiles: int) -> None:
        with rasterio.open(paths[0]) as file:
            self._megapixels = file.width * file.height / 1e6 * len(paths)
        self.title = f"{len(paths)} x {file.width} x {file.height}, {tiles} tiles"
        self._tiles = tiles
        self._files = [path.read_bytes() for path in paths]
        self._bodies = [as_json(path) for path in paths]
        self._launches: list[dict[str, list[float]]] = []
        self._probed: dict[str, str] = {}

    def run(self, ours: Server, theirs: Server, torch: Torch, rounds: int) -> None:
        """One launch's rounds."""
        ways: dict[str, Callable[[], float]] = {
            "torch forward": lambda: torch.seconds(self._tiles),
            "Baton, JSON": lambda: timed(ours.url, self._bodies, "application/json"),
            "Baton, upload": lambda: timed(ours.url, self._files, "image/tiff"),
            PLAIN: lambda: timed(theirs.url, self._bodies, "application/json"),
        }
        seen: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way()  # warm
        for number in track(range(rounds), self.title, console=Console(stderr=True)):
            for name in list(ways) if number % 2 == 0 else list(ways)[::-1]:
                time.sleep(SETTLE_S)
                seen[name].append(ways[name]())
        self._launches.append(seen)
        for name, server in (("Baton, JSON", ours), ("Baton, upload", ours), (PLAIN, theirs)):
            probe = Probe(server)
            with probe.watching():  # apart: asking all the time takes a part of two cores
                ways[name]()
            self._probed[name] = probe.row()

    def _ratio(self, other: str, name: str) -> str:
        """How many times as fast as another way: the median of the launches, the least and the most."""
        ratios = [statistics.median(seen[other]) / statistics.median(seen[name]) for seen in self._launches]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    def rows(self) -> list[str]:
        """A Markdown table."""
        table = [
            f"### {self.title}\n",
            "| way | s | megapixels/s | of torch | of plain vLLM | /health p50 ms | p99 | most | MiB |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for name in self._launches[0]:
            seconds = statistics.median(time for seen in self._launches for time in seen[name])
            ratios = f"{self._ratio('torch forward', name)} | {self._ratio(PLAIN, name)}"
            probed = self._probed.get(name, "- | - | - | -")
            pace = f"{seconds:.2f} | {self._megapixels / seconds:.3f}"
            table.append(f"| {name} | {pace} | {ratios} | {probed} |")
        return table


def whole_tile(ours: Server, folder: Path) -> list[str]:
    """One 10,980 x 10,980 scene of six bands through Baton, and what its memory did."""
    path = scene(FULL, 7, folder)
    idle = front_end_mib(ours.process.pid)
    probe = Probe(ours)
    with probe.watching():
        seconds = timed(ours.url, [path.read_bytes()], "image/tiff")
    return [
        f"{FULL} x {FULL}, six bands of int16 ({FULL**2 * 12 / 1e9:.2f} GB; "
        f"{path.stat().st_size / 1e9:.2f} GB sent): {seconds:.0f} s, "
        f"{FULL**2 / 1e6 / seconds:.2f} megapixels/s.",
        f"Memory of gateway and raster processes: {idle:.0f} MiB idle, {probe.peak_mib:.0f} MiB at most: "
        f"+{probe.peak_mib - idle:.0f} MiB. /health p50, p99, most (ms), MiB: {probe.row()}.",
    ]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each launch")
    parser.add_argument("--launches", type=int, default=3, help="of all servers")
    parser.add_argument("--full", action="store_true", help="only the whole Sentinel-2 tile, through Baton")
    parser.add_argument(
        "--light", action="store_true", help="with a model that leaves the front end the work"
    )
    options = parser.parse_args()
    model = ModelStore(Path("/nowhere")).prepare(FLOOD_TINY)
    card = json.loads((model / "config.json").read_text())["baton_geo"]
    print(f"{datetime.date.today()}, {machine()}, {options.launches} launches of {options.rounds} rounds\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.light:
            model = light_model(model, folder / "light")
        if options.full:
            with baton(folder, model) as ours:
                print("\n".join(whole_tile(ours, folder)))
            return
        comparisons = [
            Comparison([scene(BIG, 1, folder)], tiles_of(BIG, card)),
            Comparison([scene(SMALL, 2 + n, folder) for n in range(MANY)], MANY * tiles_of(SMALL, card)),
        ]
        for _ in range(options.launches):
            with baton(folder, model) as ours, plain_vllm(model) as theirs, Torch(model) as torch:
                for comparison in comparisons:
                    comparison.run(ours, theirs, torch, options.rounds)
        for comparison in comparisons:
            print("\n".join(comparison.rows()), "\n", flush=True)


if __name__ == "__main__":
    main()

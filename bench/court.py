"""Count wrong answers after faults in stored KV: Baton beside vLLM's own connectors. `make bench-court`.

SmolLM2-135M in float32, answers of greedy tokens. Each trial stores a context's KV, does one thing to its
files, asks for the context again, and compares the answer with what the same engine says when it finds
nothing stored. A wrong answer is one with status 200 and other tokens.

vLLM 0.32 has two ways to keep KV in files. `ExampleConnector` runs on CPUs, behind vLLM's own server, and is
asked like Baton. The file tier of its offloading (`vllm/v1/kv_offload/tiering/fs`) refuses CPUs as devices
("only supported on CUDA-alike and XPU GPUs"), but its reads and writes are Python and C that need no device:
its own functions store and load blocks here, and what is counted are loads that return other bytes than
were stored, without an error. So does LMCache's `LocalDiskBackend` where LMCache can be imported; its engine
refuses CPUs too ("No supported cpu connector found").
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from handoff import ASKED, prompt, table
from servers import KV_BYTES, Server, free_port, machine

from baton.config.settings import load_settings
from baton.models.store import ModelStore

CONFIG = """
[handoffs]
auto = "off"
audit = 0.0
resident = 0  # every load reads the file
store = "file:{folder}/store"

[[engines]]
name = "baton"
model = "{model}"
handoff = true
kv_cache_memory = {memory}
args = {{ enable_prefix_caching = false, max_num_seqs = 4, dtype = "float32", max_model_len = 1024 }}
"""
CONTEXT, WHOLE = 280, 300
"""Tokens of a saved context, and of a prompt with what B adds to it."""
SAID = 16
CLEAN, BIT, EXPONENT, HALF, ZEROS, SWAPPED, TUNED, STALE = FAULTS = (
    "nothing (control)",
    "one bit flipped, anywhere in a file",
    "one bit flipped, the highest of a number's exponent",
    "a file cut to half its length",
    "a failed store left visible: half of each file zeros",
    "files exchanged with another context's",
    "another fine-tune's files of the same tokens",
    "weights replaced in their folder, the store kept",
)
ORDER = (CLEAN, STALE, BIT, EXPONENT, ZEROS, SWAPPED, TUNED, HALF)
"""The one that may end a server last."""
Tokens = list[int]


@dataclass
class Context:
    """A context whose KV was stored.

    Attributes:
        files: those that its KV lies in, in order.
        whole: token ids that are asked when it is used.
        more: what a request adds to use it.
    """

    files: list[Path]
    whole: Tokens
    own: Tokens
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        tokens: None without a 200.
        cached: how many came from stored KV.
        refused: it is a 4xx, which says why.
    """

    tokens: Tokens | None
    cached: int = 0
    refused: bool = False


class System(ABC):
    """One way to keep KV in files, asked over HTTP."""

    def __init__(self, model: str, store: Path) -> None:
        self.model, self.store, self.url = model, store, ""

    async def ask(self, tokens: Tokens, model: str = "", **more: Any) -> tuple[int, dict[str, Any]]:
        """Status (0: the connection failed) and body of a completion."""
        body = ASKED | {"model": model or self.model, "prompt": tokens, "max_tokens": SAID} | more
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
                answer = await client.post("/v1/completions", json=body)
        except httpx.HTTPError:
            return 0, {}
        return answer.status_code, answer.json() if answer.status_code == 200 else {}

    def stored(self) -> set[Path]:
        """All files in the store."""
        return {path for path in self.store.rglob("*") if path.is_file()}

    @abstractmethod
    async def keep(self, seed: int) -> Context:
        """Store a context's KV."""

    async def computed(self, context: Context) -> Tokens:
        """The answer of the same engine that finds nothing stored; the files are as before afterwards."""
        _, body = await self.ask(context.whole)
        tokens: Tokens = body["choices"][0]["token_ids"]
        return tokens

    async def use(self, context: Context) -> Answer:
        """Ask for it again, with what B adds."""
        status, body = await self.ask(context.own, **context.more)
        if status != 200:
            return Answer(None, refused=400 <= status < 500)
        details = body["usage"].get("prompt_tokens_details") or {}
        return Answer(body["choices"][0]["token_ids"], details.get("cached_tokens", 0))


class Baton(System):
    """Named handoffs."""

    async def keep(self, seed: int) -> Context:
        before = self.stored()
        _, body = await self.ask(prompt(CONTEXT, seed), max_tokens=1, handoff={"save": True})
        choice, handoff = body["choices"][0], body["handoff"]["id"]
        async with httpx.AsyncClient(base_url=self.url) as client:
            address = f"/v1/handoffs/{handoff}"
            while (await client.get(address)).json()["state"] == "pending":  # noqa: ASYNC110  # of another process
                await asyncio.sleep(0.05)
        context, own = choice["prompt_token_ids"] + choice["token_ids"], prompt(WHOLE - CONTEXT - 1, seed + 1)
        files = sorted(path for path in self.stored() - before if "entries" in path.parts)
        return Context(files, context + own, own, {"handoff": {"from": handoff}})


class Example(System):
    """vLLM's ExampleConnector: a prompt that was computed is loaded when it comes again."""

    async def keep(self, seed: int) -> Context:
        before, whole = self.stored(), prompt(WHOLE, seed)
        await self.ask(whole, max_tokens=1)
        return Context(sorted(self.stored() - before), whole, whole)

    async def computed(self, context: Context) -> Tokens:
        """Asked while the context's folder is elsewhere."""
        folder, aside = context.files[0].parent, self.store.with_name("aside")
        folder.rename(aside)
        tokens = await super().computed(context)
        shutil.rmtree(folder)
        aside.rename(folder)
        return tokens


def change(path: Path, change_bytes: Callable[[bytearray], None]) -> None:
    """Change a file's bytes in their place."""
    data = bytearray(path.read_bytes())
    change_bytes(data)
    with path.open("r+b") as file:
        file.write(data)
        file.truncate(len(data))


def flip(fault: str, chance: random.Random) -> Callable[[bytearray], None]:
    """One bit of a file: any, or the highest of an exponent of a little-endian float32 in its last half."""

    def change_bytes(data: bytearray) -> None:
        if fault == BIT:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        else:
            data[len(data) - 4 * chance.randrange(1, len(data) // 8) + 3] ^= 1 << 6

    return change_bytes


def zero_half(data: bytearray) -> None:
    """Zero the second half, as after a write of which only the length reached the disk."""
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)


def cut_half(data: bytearray) -> None:
    """Remove the second half."""
    del data[len(data) // 2 :]


def do(fault: str, files: list[Path], chance: random.Random, others: list[Path], tuned: list[bytes]) -> None:
    """Do one thing to a context's files.

    Args:
        others: those of another context.
        tuned: what those of the other fine-tune hold.
    """
    if fault in (BIT, EXPONENT):
        change(chance.choice(files), flip(fault, chance))
    elif fault == HALF:
        change(chance.choice(files), cut_half)
    elif fault == ZEROS:
        for path in files:
            change(path, zero_half)
    elif fault == SWAPPED:
        held = [path.read_bytes() for path in files]
        for path, other, data in zip(files, others, held, strict=True):
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)
    elif fault == TUNED:
        for path, data in zip(files, tuned, strict=True):
            path.write_bytes(data)


@dataclass
class Tuned:
    """The other fine-tune's store: contexts whose files are kept, and bytes of files."""

    stale: list[Context]
    bytes: list[list[bytes]]


def seed_of(fault: str, number: int) -> int:
    """A seed for each trial's context."""
    return 1000 * (1 + FAULTS.index(fault)) + 10 * number


async def before(system: System, trials: int) -> Tuned:
    """Store contexts with the weights of the fine-tune."""
    stale = [await system.keep(seed_of(STALE, number)) for number in range(trials)]
    left = [await system.keep(seed_of(TUNED, number)) for number in range(trials)]
    data = [[path.read_bytes() for path in context.files] for context in left]
    for context in left:
        for path in context.files:
            path.unlink()
            if isinstance(system, Example) and not any(path.parent.iterdir()):
                path.parent.rmdir()
    return Tuned(stale, data)


Verdicts = dict[str, Counter[str]]


async def trial(system: System, fault: str, number: int, tuned: Tuned) -> str:
    """One fault, and the verdict on the answer after it."""
    chance = random.Random(seed_of(fault, number))  # which bit: a run can be repeated
    context = tuned.stale[number] if fault == STALE else await system.keep(seed_of(fault, number))
    expected = await system.computed(context)
    others = await system.keep(seed_of(fault, number) + 5) if fault == SWAPPED else context
    do(fault, context.files, chance, others.files, tuned.bytes[number])
    answer = await system.use(context)
    if answer.tokens is None:
        return "refused" if answer.refused else "no answer"
    if answer.tokens != expected:
        return "wrong"
    return "right, loaded" if answer.cached else "right, computed"


async def judge(system: System, trials: int, tuned: Tuned) -> Verdicts:
    """All faults; a server that does not answer any more ends them."""
    found: Verdicts = {fault: Counter() for fault in FAULTS}
    for fault in ORDER:
        for number in range(trials):
            verdict = await trial(system, fault, number, tuned)
            found[fault][verdict] += 1
            print(f"{system.model}: {fault}: {verdict}", file=sys.stderr, flush=True)
            if verdict == "no answer":
                await asyncio.sleep(2)
                if (await system.ask(prompt(8, 1), max_tokens=1))[0] != 200:
                    found[fault]["server lost"] += 1
                    return found
    return found


def baton(folder: Path, model: Path) -> Server:
    """A gateway with one engine that hands over."""
    config, port = folder / "baton.toml", free_port()
    config.write_text(CONFIG.format(folder=folder, model=model, memory=KV_BYTES))
    command = [str(Path(sys.executable).parent / "baton"), "serve", "--config", str(config)]
    return Server("baton", [*command, "--port", str(port)], f"http://127.0.0.1:{port}")


def example(folder: Path, model: Path) -> Server:
    """vLLM's own server with its ExampleConnector."""
    port, store = free_port(), folder / "example"
    store.mkdir(exist_ok=True)
    kept: dict[str, object] = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    kept |= {"kv_connector_extra_config": {"shared_storage_path": str(store)}}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "example", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "1024"),
        *("--kv-cache-memory-bytes", str(KV_BYTES), "--max-num-seqs", "4", "--enable-prompt-tokens-details"),
        *("--max-num-batched-tokens", "1024", "--kv-transfer-config", json.dumps(kept)),
    ]
    return Server("example", command, f"http://127.0.0.1:{port}")


def fine_tune(source: Path, target: Path) -> None:
    """Copy a model and move each of its weights a little, as training does."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    torch.manual_seed(0)
    for path in target.glob("*.safetensors"):
        weights = {name: each * (1 + 0.05 * torch.randn_like(each)) for name, each in load_file(path).items()}
        save_file(weights, path, metadata={"format": "pt"})


def replace_weights(source: Path, target: Path) -> None:
    """Put other weights into a model's folder, under the same names."""
    for path in source.glob("*.safetensors"):
        shutil.copyfile(path, target / path.name)


class FileTier:
    """Blocks in files by vLLM's file tier, without an engine.

    Attributes:
        folder: where they lie; a name is made of the model's name, the cache's shape and a block's hash.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._io = importlib.import_module("vllm.v1.kv_offload.tiering.fs.io")
        mapper = importlib.import_module("vllm.v1.kv_offload.file_mapper").FileMapper
        self._names = mapper(str(folder / "tier"), "model", 16, 1, 1, 1, 1, 1, 0, "float32")

    def restarted(self) -> FileTier:
        """The same store in an engine that is started again."""
        return FileTier(self._folder)

    def store(self, data: bytes, block: int) -> Path:
        """Store a block; return its file."""
        path = self._names.get_file_name(block.to_bytes(32, "big") + bytes(4))
        self._io.batch_store_block([path], memoryview(bytearray(data)), [0], len(data), use_o_direct=False)
        return Path(path)

    def load(self, path: Path, size: int) -> bytes | None:
        """A block's bytes; None: refused."""
        loaded = bytearray(size)
        try:
            self._io.batch_load_block([str(path)], memoryview(loaded), [0], size, use_o_direct=False)
        except OSError:
            return None
        return bytes(loaded)


class LMCacheTier:
    """Chunks in files by LMCache's `LocalDiskBackend`, without an engine."""

    SHAPE = (2, 2, 256, 64)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        name = "lmcache.v1.storage_backend"
        self._cache = importlib.import_module("lmcache.v1.memory_management").MemoryFormat.KV_2LTD
        self._key = importlib.import_module("lmcache.utils").CacheEngineKey
        made = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=False,
            max_local_cpu_size=0.25,
            local_disk=f"file://{folder}/lmcache/",
            max_local_disk_size=0.25,
        )
        described = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata(
            "model", 1, 1, 0, 0, torch.float32, (2, 2, 256, 2, 32)
        )
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        memory = importlib.import_module(f"{name}.local_cpu_backend").LocalCPUBackend
        disk = importlib.import_module(f"{name}.local_disk_backend").LocalDiskBackend
        self._memory = memory(made, described, dst_device="cpu")
        self._disk = disk(made, loop, self._memory, dst_device="cpu", metadata=described)
        self._keys: dict[Path, Any] = {}

    def restarted(self) -> LMCacheTier:
        """The same folder in an engine that is started again."""
        started = LMCacheTier(self._folder)
        started._keys = self._keys
        return started

    def _held(self, data: bytes) -> Any:
        """A chunk in LMCache's memory that holds these bytes."""
        chunk = self._memory.allocate(torch.Size(self.SHAPE), torch.float32, self._cache)
        chunk.tensor.flatten().view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return chunk

    def store(self, data: bytes, block: int) -> Path:
        """Store a chunk; return its file."""
        key, chunk, written = (
            self._key("model", 1, 0, block, torch.float32),
            self._held(data),
            threading.Event(),
        )
        self._disk.submit_put_task(key, chunk, lambda _key: written.set())
        if not written.wait(30):
            raise SystemExit("LMCache stored nothing within 30 s")
        chunk.ref_count_down()
        path = Path(self._disk.dict[key].path)
        self._keys[path] = key
        return path

    def load(self, path: Path, size: int) -> bytes | None:
        """A chunk's bytes, into memory that another chunk has used; None: refused."""
        self._held(bytes(size)).ref_count_down()
        chunk = self._disk.get_blocking(self._keys[path])
        if chunk is None:
            return None
        data = bytes(chunk.byte_array)
        chunk.ref_count_down()
        return data


def judge_tier(tier: FileTier | LMCacheTier, trials: int) -> Verdicts:
    """Faults in blocks that a tier stored, and what it loads then."""
    size, found = 1 << 18, {fault: Counter[str]() for fault in FAULTS}
    for fault in FAULTS:
        loading = tier
        for number in range(trials):
            chance = random.Random(seed_of(fault, number))
            kept, other, tuned = (chance.randbytes(size) for _ in range(3))
            held = tuned if fault == STALE else kept  # nothing of the weights is in a name
            paths = [tier.store(held, seed_of(fault, number)), tier.store(other, seed_of(fault, number) + 5)]
            do(fault, paths[:1], chance, paths[1:], [tuned])
            loading = tier.restarted() if fault == STALE and number == 0 else loading
            loaded = loading.load(paths[0], size)
            found[fault][
                "refused or not found" if loaded is None else "right" if loaded == kept else "wrong"
            ] += 1
    return found


def print_tiers(folder: Path, trials: int) -> None:
    """Print how the tiers that need no engine take each fault."""
    tiers: dict[str, FileTier | LMCacheTier] = {"vLLM's file tier": FileTier(folder)}
    if importlib.util.find_spec("lmcache") is not None:
        tiers[f"LMCache {importlib.metadata.version('lmcache')}"] = LMCacheTier(folder)
    found = [judge_tier(tier, trials) for tier in tiers.values()]
    print("Loads without an engine:\n")
    table(["what was done", *tiers], [[fault, *(cell(each[fault]) for each in found)] for fault in FAULTS])


def cell(verdicts: Counter[str]) -> str:
    """Verdicts and how many had them, the wrong ones first."""
    return ", ".join(f"{verdicts[name]} {name}" for name in sorted(verdicts, key="wrong".__ne__)) or "not run"


SYSTEMS: dict[str, type[System]] = {"example": Example, "baton": Baton}
STORES = {"example": "example", "baton": "store"}
STARTS = {"example": example, "baton": baton}
TITLES = {"example": "vLLM's ExampleConnector", "baton": "Baton"}


def run(folder: Path, options: argparse.Namespace) -> None:
    """The weights of the fine-tune first, then those that are asked, in one folder."""
    source, model = (
        Path(ModelStore(load_settings(None).models_folder).resolve(options.model)),
        folder / "model",
    )
    found = {}
    for name in options.systems:
        fine_tune(source, model)
        system, start = SYSTEMS[name](name, folder / STORES[name]), STARTS[name]
        with start(folder, model) as server:
            system.url = server.url
            tuned = asyncio.run(before(system, options.trials))
        replace_weights(source, model)
        with start(folder, model) as server:
            system.url = server.url
            found[TITLES[name]] = asyncio.run(judge(system, options.trials, tuned))
    table(
        ["what was done", *found],
        [[fault, *(cell(each[fault]) for each in found.values())] for fault in FAULTS],
    )


def main() -> None:
    """Run all trials, and print Markdown for docs/results/court.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=4, help="of each fault")
    parser.add_argument("--model", default="smollm2", help="an embedded model's name, or a folder")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--tiers", action="store_true", help="only what needs no engine")
    options = parser.parse_args()
    typed = f"make bench-court ARGS='{' '.join(sys.argv[1:])}'"
    print(f"`{typed}`, {datetime.date.today()}, {machine()}\n", flush=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        if not options.tiers:
            run(Path(folder), options)
        print_tiers(Path(folder), options.trials)


if __name__ == "__main__":
    main()

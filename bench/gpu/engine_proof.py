"""Prove handoffs in vLLM's engine on a GPU; measure them beside its prefix cache and its own offloading.

    python bench/gpu/engine_proof.py weights FOLDER 1b 8b  # make models with random weights
    python bench/gpu/engine_proof.py smoke FOLDER/1b       # which ways to run an engine work here
    python bench/gpu/engine_proof.py proof FOLDER/1b       # loads against the engine's own prefix cache
    python bench/gpu/engine_proof.py speed FOLDER/8b       # first tokens, and steps beside saves and loads
    python bench/gpu/engine_proof.py peer FOLDER/8b        # first tokens with vLLM's OffloadingConnector

Each prints its results as JSON, and writes them to `--json` as they come. It needs vLLM and the connector, no
gateway and no tokenizer. `--device cpu` with the shape `tiny` tries the logic anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

SHAPES = {
    "tiny": {
        "hidden": 256,
        "inner": 512,
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "values": 64,
        "vocab": 2048,
    },
    "1b": {
        "hidden": 2048,
        "inner": 8192,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "values": 64,
        "vocab": 128256,
    },
    "8b": {
        "hidden": 4096,
        "inner": 14336,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "values": 128,
        "vocab": 128256,
    },
}
"""Those of Llama-3.2-1B and Llama-3.1-8B, and one for a CPU."""
SPREAD = 0.02
"""Standard deviation of the weights, as models are initialised; a smaller one gives flat answers, which hide
errors."""
MODES: dict[str, dict[str, Any]] = {
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
    "eager": {"enforce_eager": True},
    "graphs-v1": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}, "runner": "0"},
    "compiled": {},
    "stub": {
        "enforce_eager": True,
        "attention_backend": "TRITON_ATTN",
        "compilation_config": {"mode": 0, "custom_ops": ["none"]},
        "kernels": "stub",
        "runner": "0",
    },
}
"""Ways to run an engine, the best to prove with first. Graphs of whole steps skip the hooks in the layers;
`stub` works without vLLM's compiled kernels, on Triton's and torch's."""
ALIGNED = (48, 64, 160, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 7936)
UNALIGNED = (19, 33, 77, 131, 255, 517, 1023, 1537, 2049, 3001, 5003, 7777)
BLOCK = 16
OWN_TOKENS = 33
"""Tokens that a continuation adds."""
ANSWER_TOKENS = 24
AT_ONCE = 8
FAR = 0.5
"""Nats: more than another order of sums explains in bfloat16."""
GIB = 2**30
LONGEST_WAIT_S = {"save": 60.0, "load": 3.0}
"""A load is reported before its request's answer, a save some time after."""


def prompt(length: int, seed: int, vocab: int) -> list[int]:
    """Return token ids that no other seed shares a prefix with."""
    return [1 + (seed * 104729 + index * 7919 + index * index * 31) % (vocab - 2) for index in range(length)]


# Weights


def make_weights(folder: Path, name: str, device: str) -> dict[str, Any]:
    """Write a model in the shape of Llama with random weights; return what was written."""
    from safetensors.torch import save_file

    shape, began = SHAPES[name], time.perf_counter()
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["inner"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["values"],
        "vocab_size": shape["vocab"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": shape["vocab"] - 1,
    }
    generator = torch.Generator(device).manual_seed(1)

    def random(*sizes: int) -> torch.Tensor:
        made = torch.empty(sizes, dtype=torch.bfloat16, device=device)
        return made.normal_(0.0, SPREAD, generator=generator)

    hidden, inner = shape["hidden"], shape["inner"]
    queries, keys = shape["heads"] * shape["values"], shape["kv_heads"] * shape["values"]
    ones = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    places: dict[str, str] = {}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, target / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, file))

    for layer in range(shape["layers"]):
        of = f"model.layers.{layer}."
        tensors = {
            "self_attn.q_proj.weight": random(queries, hidden),
            "self_attn.k_proj.weight": random(keys, hidden),
            "self_attn.v_proj.weight": random(keys, hidden),
            "self_attn.o_proj.weight": random(hidden, queries),
            "mlp.gate_proj.weight": random(inner, hidden),
            "mlp.up_proj.weight": random(inner, hidden),
            "mlp.down_proj.weight": random(hidden, inner),
            "input_layernorm.weight": ones.clone(),
            "post_attention_layernorm.weight": ones.clone(),
        }
        write(f"model-{layer:02}.safetensors", {of + name: tensor for name, tensor in tensors.items()})
    ends = {
        "model.embed_tokens.weight": random(shape["vocab"], hidden),
        "lm_head.weight": random(shape["vocab"], hidden),
        "model.norm.weight": ones,
    }
    write("model-ends.safetensors", ends)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "config.json").write_text(json.dumps(config))
    return {
        "model": str(target),
        "gib": round(size / GIB, 2),
        "seconds": round(time.perf_counter() - began, 1),
    }


# Engines


@dataclass
class Answer:
    """What an engine answered.

    Attributes:
        tokens: its token ids.
        logprobs: the log probability of each.
        cached: tokens of the prompt that were not computed.
        params: the transfer parameters that came back.
        times: when each token came, monotonic seconds.
        first_s: seconds to the first token.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    params: dict[str, Any] | None = None
    times: list[float] = field(default_factory=list)
    first_s: float = 0.0

    def same(self, other: Answer) -> bool:
        """Return whether tokens and log probabilities are the same to the last bit."""
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)

    def furthest(self, other: Answer) -> float:
        """Return the largest difference of log probabilities, up to the first token that differs."""
        pairs = zip(self.tokens, other.tokens, self.logprobs, other.logprobs, strict=True)
        gaps = [0.0]
        for one, two, logprob, other_logprob in pairs:
            if one != two:
                break
            gaps.append(abs(logprob - other_logprob))
        return max(gaps)


class Engine:
    """An engine with a KV connector, and the outcomes that the connector reports."""

    def __init__(self, client: Any, outcomes: list[dict[str, Any]], vocab: int) -> None:
        self.client = client
        self.outcomes = outcomes
        self.vocab = vocab
        self.block: int = client.vllm_config.cache_config.block_size
        self._asked = 0

    async def ask(
        self,
        tokens: Sequence[int],
        max_tokens: int = 1,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
        into: Answer | None = None,
    ) -> Answer:
        """Ask for a continuation; `into` is filled as tokens come.

        Args:
            tokens: the prompt.
            max_tokens: tokens of the answer.
            params: `kv_transfer_params`.
            salt: with another one, no prefix is found in the engine's own cache.
            into: the answer to fill.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        answer, self._asked = into or Answer(), self._asked + 1
        asked = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            logprobs=1,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        given = tokens_input(list(tokens), cache_salt=salt)
        began = time.perf_counter()
        async for output in self.client.generate(given, asked, f"r{self._asked}-{id(self)}"):
            now, part = time.perf_counter(), output.outputs[0]
            answer.first_s = answer.first_s or now - began
            answer.times += [now] * len(part.token_ids)
            answer.tokens += part.token_ids
            for token, step in zip(part.token_ids, part.logprobs or (), strict=True):
                answer.logprobs.append(step[token].logprob)
            answer.cached = output.num_cached_tokens or answer.cached
            answer.params = output.kv_transfer_params or answer.params
        return answer

    async def outcome(self, kind: str, known: int) -> dict[str, Any]:
        """Wait for the next outcome of a kind after the first `known` ones; it tells if none came."""
        ends = time.monotonic() + LONGEST_WAIT_S[kind]
        while time.monotonic() < ends:
            for row in self.outcomes[known:]:
                if row["kind"] == kind:
                    return row
            await asyncio.sleep(0.002)
        return {"kind": kind, "key": "", "failure": "not reported", "seconds": math.nan, "bytes": 0}

    async def save(self, tokens: Sequence[int]) -> tuple[Answer, dict[str, Any]]:
        """Compute a context and one token, and save it; return the answer and the save's outcome."""
        known = len(self.outcomes)
        answer = await self.ask(tokens, params=params_of(save=True))
        saved = await self.outcome("save", known)
        if saved["failure"]:
            raise RuntimeError(f"a save failed: {saved}")
        return answer, saved

    async def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        ends = time.monotonic() + LONGEST_WAIT_S["save"]
        while not await self.client.reset_prefix_cache():
            if time.monotonic() > ends:
                raise TimeoutError("the prefix cache cannot be emptied")
            await asyncio.sleep(0.01)

    def facts(self) -> dict[str, Any]:
        """Return how the engine runs."""
        config = self.client.vllm_config
        return {
            "async_scheduling": config.scheduler_config.async_scheduling,
            "second_model_runner": config.use_v2_model_runner,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "compilation_mode": str(config.compilation_config.mode),
            "attention_backend": str(config.attention_config.backend),
            "block_size": config.cache_config.block_size,
            "kv_cache_layout": os.environ.get("VLLM_KV_CACHE_LAYOUT", "default"),
        }


def params_of(**wanted: Any) -> dict[str, Any]:
    """Return the connector's `kv_transfer_params`."""
    from baton_kv.contract import transfer_params

    return transfer_params(**wanted)


def baton(store: Path) -> dict[str, Any]:
    """Return the `kv_transfer_config` of an engine with Baton's connector."""
    return {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton_kv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": f"file:{store}", "unproven_devices": True},
    }


def offloading(gib: float) -> dict[str, Any]:
    """Return the `kv_transfer_config` of an engine with vLLM's own connector to host memory."""
    extra = {"cpu_bytes_to_use": int(gib * GIB)}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@asynccontextmanager
async def engine(options: argparse.Namespace, transfer: dict[str, Any]) -> AsyncIterator[Engine]:
    """Start an engine for the time of the context."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    outcomes: list[dict[str, Any]] = []

    class Watch(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            reported = getattr(scheduler_stats, "kv_connector_stats", None) or {}
            data = getattr(reported, "data", reported)
            outcomes.extend(data.get("outcomes", []))

        def log_engine_initialized(self) -> None: ...

    mode = {key: value for key, value in MODES[options.mode].items() if key not in ("runner", "kernels")}
    config = json.loads((Path(options.model) / "config.json").read_text())
    arguments: dict[str, Any] = {
        "model": options.model,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": options.longest,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": int(options.kv_gib * GIB),
        "kv_transfer_config": transfer,
        "disable_log_stats": True,
    }
    arguments |= mode
    if options.device == "cuda":
        arguments |= {"async_scheduling": True, "block_size": BLOCK, "gpu_memory_utilization": 0.05}
    client = await asyncio.to_thread(
        lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[Watch])
    )
    try:
        yield Engine(client, outcomes, config["vocab_size"])
    finally:
        client.shutdown()


# Smoke


def smoke(options: argparse.Namespace, results: Results) -> None:
    """Start an engine in every mode at once, each in a process of its own; keep which of them work."""
    running = {}
    for mode in options.modes or MODES:
        log = results.logs / f"smoke-{mode}.log"
        command = [sys.executable, __file__, "one", options.model, "--mode", mode, "--device", options.device]
        command += ["--kv-gib", str(options.kv_gib), "--longest", "2048", "--folder", options.folder]
        command += ["--json", str(results.logs / f"{mode}.json")]
        with log.open("w") as written:
            started = subprocess.Popen(
                command, env=environment(mode, options), stdout=written, stderr=written
            )
        running[mode] = (started, log)
    ends = time.monotonic() + options.seconds
    for mode, (process, log) in running.items():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, ends - time.monotonic()))
        late = process.poll() is None
        if late:
            process.terminate()
        found = said(results.logs / f"{mode}.json", log) | ({"ended": "too slow"} if late else {})
        results.keep(mode, {"works": "answer" in found} | found)
    works = [mode for mode in running if results.rows[mode]["works"]]
    results.keep("works", works)
    print("WORKS", *works)


def said(path: Path, log: Path) -> dict[str, Any]:
    """Return what a process wrote, or the errors in its log."""
    found = json.loads(path.read_text()) if path.exists() else {}
    lines = log.read_text(errors="replace").splitlines()
    told = [line[-300:] for line in lines if "attention backend" in line or "odel runner" in line]
    errors = [line[-400:] for line in lines if "Error" in line or "error:" in line]
    return found | {"log": told[:4]} | ({"errors": errors[-12:]} if "answer" not in found else {})


def environment(mode: str, options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a process whose engines run in a mode."""
    found, chosen = os.environ | {"ENGINE_PROOF_MODE": mode}, MODES[mode]
    if "runner" in chosen:
        found["VLLM_USE_V2_MODEL_RUNNER"] = chosen["runner"]
    if chosen.get("kernels") == "stub":
        found["PYTHONPATH"] = f"{Path(__file__).parent / 'stub'}:{found.get('PYTHONPATH', '')}"
    if options.device == "cpu":
        found |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return found | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


async def one(options: argparse.Namespace, results: Results) -> None:
    """Start one engine, ask it, save and load."""
    began = time.perf_counter()
    async with engine(options, baton(results.store)) as first:
        results.keep("started_s", round(time.perf_counter() - began, 1))
        results.keep("facts", first.facts())
        context = prompt(100, 1, first.vocab)
        answer, saved = await first.save(context)
        hit = await first.ask(context + answer.tokens, 8)
        load = params_of(load=saved["key"])
        loaded = await first.ask(context + answer.tokens, 8, load, salt="other")
        told = {"answer": hit.tokens, "cached": [hit.cached, loaded.cached], "save_s": saved["seconds"]}
        results.keep("answer", told | {"same": hit.tokens == loaded.tokens, "outcomes": first.outcomes[:4]})


# Proof


async def proof(options: argparse.Namespace, results: Results) -> None:
    """Load on one engine what another saved; compare with the other's own prefix cache."""
    transfer = baton(results.store)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(engine(options, transfer))
        second = await stack.enter_async_context(engine(options, transfer))  # no two forks at once
        results.keep("facts", first.facts())
        for length in sorted([*ALIGNED, *UNALIGNED]):
            if first.block <= length < options.longest - 64:
                await one_length(first, second, length, results)
        await corrupted(first, second, results)
        await beside_traffic(first, second, results)
    rows = results.rows["lengths"]
    results.keep(
        "summary",
        {
            "lengths": len(rows),
            "loaded": sum(row["loaded"] for row in rows),
            "bit for bit": sum(row["same"] for row in rows),
            "controls that differ": sum(row["control_differs"] for row in rows),
            "whole loads with the same tokens": sum(
                row.get("whole", {}).get("tokens", False) for row in rows
            ),
            "whole loads": sum("whole" in row for row in rows),
        },
    )


async def one_length(first: Engine, second: Engine, length: int, results: Results) -> None:
    """Continue a context of this length on both engines, with another context as control.

    The engine's own cache holds whole blocks, so a context that ends within one is loaded as far as its last
    whole block: then both engines compute the same tokens in one batch. Loaded whole, the rest is computed in
    a batch of another shape, and only the tokens and how far their probabilities are apart are kept.
    """
    context = prompt(length, length, first.vocab)
    answer, saved = await first.save(context)
    whole = context + answer.tokens + prompt(OWN_TOKENS, length + 1, first.vocab)
    whole_blocks = length // first.block * first.block
    limit = {} if length == whole_blocks else {"limit": whole_blocks}
    known = len(second.outcomes)
    loaded = await second.ask(whole, ANSWER_TOKENS, params_of(load=saved["key"], **limit))
    outcome = await second.outcome("load", known)
    hit = await first.ask(whole, ANSWER_TOKENS)
    cold = await first.ask(whole, ANSWER_TOKENS, salt=f"cold-{length}")
    other = [whole[0] % (first.vocab - 2) + 1, *whole[1:]]
    control = await first.ask(other, ANSWER_TOKENS)
    row = {
        "tokens": length,
        "loaded": outcome["failure"] is None and loaded.cached == hit.cached == whole_blocks,
        "failure": outcome["failure"],
        "cached": [loaded.cached, hit.cached],
        "same": loaded.same(hit),
        "furthest": loaded.furthest(hit),
        "furthest_of_prefill": cold.furthest(hit),
        "distinct_tokens": len(set(hit.tokens)),
        "control_differs": not control.same(hit),
        "load_ms": outcome["seconds"] * 1000,
        "save_ms": saved["seconds"] * 1000,
    }
    if limit:
        of_all = await second.ask(whole, ANSWER_TOKENS, params_of(load=saved["key"]), salt=f"all-{length}")
        told = {
            "cached": of_all.cached,
            "tokens": of_all.tokens == hit.tokens,
            "furthest": of_all.furthest(hit),
        }
        row["whole"] = told
    results.add("lengths", row)


async def corrupted(first: Engine, second: Engine, results: Results) -> None:
    """Load an entry with one flipped bit: it must be computed, and the answer must be that of a prefill."""
    context = prompt(2000, 77, first.vocab)
    answer, saved = await first.save(context)
    whole = context + answer.tokens + prompt(OWN_TOKENS, 78, first.vocab)
    (file,) = results.store.rglob(f"{saved['key'].partition('/')[2]}.kv")
    with file.open("r+b") as held:
        held.seek(file.stat().st_size * 6 // 10)
        (byte,) = held.read(1)
        held.seek(-1, os.SEEK_CUR)
        held.write(bytes([byte ^ 4]))
    known = len(second.outcomes)
    loaded = await second.ask(whole, ANSWER_TOKENS, params_of(load=saved["key"]), salt="corrupt")
    outcome = await second.outcome("load", known)
    cold = await second.ask(whole, ANSWER_TOKENS, salt="cold")
    refused = outcome["failure"] == "corrupt" and loaded.cached == 0
    told = {"failure": outcome["failure"], "cached": loaded.cached, "same_as_prefill": loaded.same(cold)}
    results.keep("corrupt", told | {"right": refused and loaded.same(cold)})


async def beside_traffic(first: Engine, second: Engine, results: Results) -> None:
    """Load several entries at once beside decoding; batches differ, so the last bits may."""
    saved = [await first.save(prompt(1500 + number, 300 + number, first.vocab)) for number in range(AT_ONCE)]
    traffic = [
        asyncio.create_task(second.ask(prompt(200, 400 + number, first.vocab), 200))
        for number in range(AT_ONCE)
    ]
    await asyncio.sleep(0.2)
    wholes = [
        prompt(1500 + number, 300 + number, first.vocab) + answer.tokens + [5, 6, 7]
        for number, (answer, _) in enumerate(saved)
    ]
    asked = zip(wholes, saved, strict=True)
    loads = (second.ask(whole, 8, params_of(load=row["key"])) for whole, (_, row) in asked)
    loaded = await asyncio.gather(*loads)
    await asyncio.gather(*traffic)
    hits = [await first.ask(whole, 8) for whole in wholes]
    pairs = list(zip(loaded, hits, strict=True))
    told = {
        "at_once": AT_ONCE,
        "loaded": sum(answer.cached >= 1500 for answer in loaded),
        "far": sum(one.tokens[0] == two.tokens[0] and one.furthest(two) > FAR for one, two in pairs),
        "same_first_token": sum(one.tokens[0] == two.tokens[0] for one, two in pairs),
    }
    results.keep("beside_traffic", told)


# Speed


async def speed(options: argparse.Namespace, results: Results) -> None:
    """Measure first tokens after a prefill, a load and a hit, then steps beside saves and loads."""
    began = time.perf_counter()
    async with engine(options, baton(results.store)) as only:
        results.keep("facts", only.facts() | {"started_s": round(time.perf_counter() - began, 1)})
        await only.save(prompt(300, 1, only.vocab))  # warm
        for length in options.lengths:
            for number in range(options.rounds):
                results.add("first_tokens", await first_tokens(only, length, number, results.store))
        results.keep("medians_ms", medians(results.rows["first_tokens"]))
        await steps(only, options, results)


async def first_tokens(only: Engine, length: int, number: int, store: Path) -> dict[str, Any]:
    """Return milliseconds to the first token of one continuation, each way."""
    context = prompt(length, 1000 + length + number, only.vocab)
    answer, saved = await only.save(context)
    whole = context + answer.tokens + prompt(OWN_TOKENS, 2000 + number, only.vocab)
    hit = await only.ask(whole)
    row = {"tokens": length, "prefill": answer.first_s * 1000, "hit": hit.first_s * 1000}
    row |= {"save_ms": saved["seconds"] * 1000, "bytes": saved["bytes"]}
    for name in ("load", "second_load"):
        await only.forget()
        known = len(only.outcomes)
        loaded = await only.ask(whole, params=params_of(load=saved["key"]))
        outcome = await only.outcome("load", known)
        row |= {name: loaded.first_s * 1000, f"{name}_itself": outcome["seconds"] * 1000}
        row |= {f"{name}_gib_s": outcome["bytes"] / GIB / outcome["seconds"], f"{name}_cached": loaded.cached}
        row |= {f"{name}_failure": outcome["failure"]}
    remove(store, saved["key"])  # room for the next
    return row


def remove(store: Path, key: str) -> None:
    """Remove an entry's files."""
    for file in store.rglob(f"{key.partition('/')[2]}.*"):
        file.unlink(missing_ok=True)


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the medians of each length's figures."""
    found: dict[str, dict[str, float]] = {}
    for length in sorted({row["tokens"] for row in rows}):
        mine = [row for row in rows if row["tokens"] == length]
        names = [name for name, value in mine[0].items() if isinstance(value, float)]
        found[str(length)] = {name: round(statistics.median(row[name] for row in mine), 2) for name in names}
    return found


async def steps(only: Engine, options: argparse.Namespace, results: Results) -> None:
    """Measure the time between tokens of running streams alone, beside saves and beside loads."""
    context = prompt(options.lengths[-1], 9000, only.vocab)
    answer, saved = await only.save(context)
    streams = [Answer() for _ in range(AT_ONCE)]
    most = options.longest - 600
    running = [
        asyncio.create_task(only.ask(prompt(500, 9100 + number, only.vocab), most, into=stream))
        for number, stream in enumerate(streams)
    ]
    while min(len(stream.times) for stream in streams) < 20:  # noqa: ASYNC110  # vLLM tells only by tokens
        await asyncio.sleep(0.01)
    windows: dict[str, list[tuple[float, float]]] = {"alone": [], "saving": [], "loading": []}
    try:
        for number in range(3):
            began = time.perf_counter()
            await asyncio.sleep(options.pause)
            windows["alone"].append((began, time.perf_counter()))
            known = len(only.outcomes)
            await only.ask(context + answer.tokens, params=params_of(save=True))
            began = time.perf_counter()
            outcome = await only.outcome("save", known)
            windows["saving"].append((began, time.perf_counter()))
            results.add("beside", {"kind": "save"} | outcome)
            remove(results.store, outcome["key"])
            known, began = len(only.outcomes), time.perf_counter()
            whole = [*context, *answer.tokens, 7]
            await only.ask(whole, params=params_of(load=saved["key"]), salt=f"beside-{number}")
            windows["loading"].append((began, time.perf_counter()))
            results.add("beside", {"kind": "load"} | await only.outcome("load", known))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    found = {}
    for name, spans in windows.items():
        gaps = sorted(
            (later - earlier) * 1000
            for stream in streams
            for earlier, later in pairwise(stream.times)
            for began, ended in spans
            if began <= earlier and later <= ended
        )
        if gaps:
            found[name] = {
                "gaps": len(gaps),
                "median_ms": round(statistics.median(gaps), 3),
                "p99_ms": round(gaps[int(len(gaps) * 0.99)], 3),
                "seconds": round(sum(ended - began for began, ended in spans), 2),
            }
    results.keep("steps", found)


async def peer(options: argparse.Namespace, results: Results) -> None:
    """Measure first tokens after a prefill, a load and a hit with vLLM's own offloading to host memory."""
    began = time.perf_counter()
    async with engine(options, offloading(options.host_gib)) as only:
        results.keep("facts", only.facts() | {"started_s": round(time.perf_counter() - began, 1)})
        await only.ask(prompt(300, 1, only.vocab))
        for length in options.lengths:
            for number in range(options.rounds):
                context = prompt(length, 1000 + length + number, only.vocab)
                answer = await only.ask(context)
                whole = context + answer.tokens + prompt(OWN_TOKENS, 2000 + number, only.vocab)
                hit = await only.ask(whole)
                row = {"tokens": length, "prefill": answer.first_s * 1000, "hit": hit.first_s * 1000}
                await asyncio.sleep(options.pause)  # its stores run behind the answers
                for name in ("load", "second_load"):
                    await only.forget()
                    loaded = await only.ask(whole)
                    row |= {name: loaded.first_s * 1000, f"{name}_cached": loaded.cached}
                results.add("first_tokens", row)
        results.keep("medians_ms", medians(results.rows["first_tokens"]))


# Results


class Results:
    """The results of a stage, which are written whenever one is added.

    Args:
        path: the file to write; None: they are printed only.
        logs: folder of logs.
        store: folder of the entries.
    """

    def __init__(self, path: Path | None, logs: Path, store: Path) -> None:
        self._path = path
        self.logs = logs
        self.store = store
        self.rows: dict[str, Any] = {}

    def keep(self, name: str, value: Any, told: Any = None) -> None:
        self.rows[name] = value
        print(name, json.dumps(value if told is None else told, default=str), flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self.rows, indent=1, default=str))

    def add(self, name: str, row: dict[str, Any]) -> None:
        self.keep(name, [*self.rows.get(name, []), row], row)


ASYNC_STAGES = {"one": one, "proof": proof, "speed": speed, "peer": peer}


def main() -> None:
    """Run a stage; exit with 1 if it failed, after writing what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("weights", "smoke", *ASYNC_STAGES))
    parser.add_argument("model", help="the model's folder; of `weights`, the folder to write to")
    parser.add_argument("shapes", nargs="*", choices=[[], *SHAPES], default=[], help="of `weights`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mode", choices=MODES, default="eager")
    parser.add_argument("--modes", choices=MODES, nargs="+", help="of `smoke`, all if none are given")
    parser.add_argument("--json", type=Path, help="file to write results to")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--folder", default="/dev/shm", help="where entries are stored, up to 12 GiB")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 30000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=8192, help="`max_model_len`")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="of each engine's KV cache on the device")
    parser.add_argument("--host-gib", type=float, default=20.0, help="of host memory for OffloadingConnector")
    parser.add_argument("--pause", type=float, default=1.5, help="seconds of steps alone")
    parser.add_argument("--seconds", type=float, default=100.0, help="longest that `smoke` takes")
    options = parser.parse_args()
    if os.environ.get("ENGINE_PROOF_MODE") != options.mode:  # some of it is read when Python starts
        os.execve(sys.executable, [sys.executable, *sys.argv], environment(options.mode, options))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = Results(options.json, options.logs, Path(folder) / "store")
        if options.device == "cuda":
            results.keep(
                "card", torch.cuda.get_device_name(0) if options.stage == "weights" else "see weights"
            )
        results.keep("mode", options.mode)
        try:
            if options.stage == "weights":
                for name in options.shapes:
                    results.keep(name, make_weights(Path(options.model), name, options.device))
            elif options.stage == "smoke":
                smoke(options, results)
            else:
                asyncio.run(ASYNC_STAGES[options.stage](options, results))
        except Exception:  # noqa: BLE001  # the stage's border: what was found so far is kept with it
            results.keep("error", traceback.format_exc()[-3000:])
            raise SystemExit(1) from None


if __name__ == "__main__":
    main()

"""The pace of a running stream while KV is saved and loaded beside it: `bench/beside.py --model FOLDER`.

One engine decodes one stream; beside it a second worker of the connector over the same KV cache saves and
loads entries of blocks that the stream has not, at a steady rate: what requests that end and begin have the
connector do, without those requests' own computing. Rounds with and without alternate. Printed are the
medians of the rounds' tokens a second, their ratio, and how much one GiB costs the stream.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from servers import machine

BLOCKS = 16
KV_BYTES = 512 * 1024 * 1024
BUDGET = 256 * 1024 * 1024
"""Of the store, which is full before anything is measured, as one is that has run for a while: memory that a
virtual machine has never used costs several times as much to begin with."""


class Beside:
    """Saves and loads entries of so many tokens, so many a second, while it is entered."""

    def __init__(self, worker: Any, tokens: int, block_size: int, first: int, rate: float) -> None:
        from baton_kv.blocks import GroupBlocks

        self._worker, self._tokens, self._rate = worker, tokens, rate
        ids = tuple(range(first, first + -(-tokens // block_size)))
        self._blocks = (GroupBlocks(0, ids),)
        self._over = threading.Event()
        self.bytes = self.largest = 0

    def __enter__(self) -> Beside:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def fill(self, budget: int) -> None:
        """Save until a store of this size is full twice."""
        while self.bytes < 4 * budget:  # a pair saves as much as it loads
            self._pair()
        self.bytes = 0

    def _run(self) -> None:
        due = time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due += 1 / self._rate
            self._pair()

    def _pair(self) -> None:
        from baton_kv.contract import new_key
        from baton_kv.messages import LoadJob, SaveJob, StepJobs

        key = new_key("bench")
        ids = tuple(range(self._tokens))
        self._do(StepJobs(saves=[SaveJob("a", key, ids, self._tokens, self._blocks, "bench", "0" * 32)]))
        self._do(StepJobs(loads=[LoadJob("b", key, self._blocks, self._tokens, "bench")]))

    def _do(self, jobs: Any) -> None:
        self._worker.start(jobs)
        while not (finished := self._worker.poll()).outcomes:
            time.sleep(0.002)
        (outcome,) = finished.outcomes
        assert outcome.failure is None, outcome
        self.bytes += outcome.bytes
        self.largest = max(self.largest, outcome.bytes)


def main() -> None:
    """Measure, and print one line of Markdown a rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--said", type=int, default=200, help="tokens of the stream in a round")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an entry")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 2.0], help="saves and loads a second")
    options = parser.parse_args()
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.inputs import TokensPrompt

    from baton_kv.folders import store_secret
    from baton_kv.stores.file import FileStore
    from baton_kv.worker_role import WorkerRole

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        llm = LLM(
            model=options.model,
            enforce_eager=True,
            max_model_len=2048,
            kv_cache_memory_bytes=KV_BYTES,
            distributed_executor_backend="uni",
            kv_transfer_config={
                "kv_connector": "BatonConnector",
                "kv_connector_module_path": "baton_kv.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"store": f"file:{folder}/store"},
            },
        )
        core = llm.llm_engine.engine_core.engine_core
        cache = core.vllm_config.cache_config
        store = FileStore(Path(folder) / "beside", budget=BUDGET)
        own = get_kv_transfer_group()._worker._blocks
        worker = WorkerRole(store, store_secret(store.root), own, resident=64 * 2**20)
        first = cache.num_gpu_blocks - BLOCKS - -(-options.tokens // cache.block_size)
        params = SamplingParams(max_tokens=options.said, temperature=0, ignore_eos=True)

        def pace() -> float:
            began = time.perf_counter()
            llm.generate([TokensPrompt(prompt_token_ids=[*range(5, 69)])], params, use_tqdm=False)
            return options.said / (time.perf_counter() - began)

        Beside(worker, options.tokens, cache.block_size, first, 1).fill(BUDGET)
        pace()
        print(f"`bench/beside.py`, {datetime.date.today()}, {machine()}, load {os.getloadavg()[0]:.1f}\n")
        print("| saves and loads a second | MiB each | alone, tokens/s | beside | ratio | stream's s a GiB |")
        print("|---" * 6 + "|")
        for rate in options.rates:
            alone, beside, lost = list[float](), list[float](), list[float]()
            for _ in range(options.rounds):
                alone.append(pace())
                with Beside(worker, options.tokens, cache.block_size, first, rate) as moving:
                    beside.append(pace())
                    moved = moving.bytes / 2**30
                lost.append((options.said / beside[-1] - options.said / alone[-1]) / max(moved, 1e-9))
            each = moving.largest / 2**20
            ratio = statistics.median(one / two for one, two in zip(beside, alone, strict=True))
            cells = [f"{rate:g}", f"{each:.1f}", f"{statistics.median(alone):.1f}"]
            cells += [f"{statistics.median(beside):.1f}", f"{ratio:.3f}", f"{statistics.median(lost):.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

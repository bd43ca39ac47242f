"""AsyncLLM called directly, one request at a time: prints the p50 in ms. `direct.py MODEL COUNT`."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time

from servers import ENGINE_ARGS, KV_BYTES

PROMPT_IDS = list(range(1000, 1032))


async def measure(model: str, count: int) -> dict[str, float]:
    """p50 of a one-token completion, without HTTP."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=model, kv_cache_memory_bytes=KV_BYTES, **ENGINE_ARGS)
    )  # type: ignore[arg-type]  # a table of settings
    params = SamplingParams(max_tokens=1, temperature=0)
    seconds = []
    print("ready", flush=True)
    for line in sys.stdin:
        seconds.clear()
        for number in range(count):
            began = time.perf_counter()
            async for _ in engine.generate(tokens_input(PROMPT_IDS), params, f"{line.strip()}-{number}"):
                pass
            seconds.append(time.perf_counter() - began)
        print(json.dumps({"p50_ms": statistics.median(seconds) * 1000}), flush=True)
    engine.shutdown()
    return {}


if __name__ == "__main__":
    asyncio.run(measure(sys.argv[1], int(sys.argv[2])))

"""AsyncLLM called directly, one request at a time: prints the milliseconds. `direct.py MODEL COUNT`."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

from servers import ENGINE_ARGS, KV_BYTES

PROMPT_IDS = list(range(1000, 1032))
PAUSE_S = 0.008
"""Up to this long before each request: one right after the other falls into step with the kernel's tick,
which the engine's processes wait by, and every difference becomes a whole tick (4 ms) or none."""


async def measure(model: str, count: int) -> None:
    """One-token completions without HTTP; a round for every line of stdin."""
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
            await asyncio.sleep(random.uniform(0, PAUSE_S))
            began = time.perf_counter()
            async for _ in engine.generate(tokens_input(PROMPT_IDS), params, f"{line.strip()}-{number}"):
                pass
            seconds.append(time.perf_counter() - began)
        print(json.dumps([second * 1000 for second in seconds]), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(measure(sys.argv[1], int(sys.argv[2])))

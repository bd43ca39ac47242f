"""Plain vLLM, offline, one prompt at a time: `plain_vllm.py MODEL OUT < prompts.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="0-1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
        "0"  # core and worker would import vLLM again, each for itself
    )
    from vllm import LLM, SamplingParams

    model, out = sys.argv[1:]
    engine = LLM(
        model,
        dtype="float32",
        distributed_executor_backend="uni",
        max_model_len=2048,
        enforce_eager=True,
        kv_cache_memory_bytes=256 * 1024 * 1024,
    )
    greedy = SamplingParams(max_tokens=24, temperature=0)
    answers = {}
    for prompt in json.load(sys.stdin):
        said = engine.generate(prompt, greedy, use_tqdm=False)[0].outputs[0]
        answers[prompt] = {"text": said.text, "token_ids": list(said.token_ids)}
    Path(out).write_text(json.dumps(answers))

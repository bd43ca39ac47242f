"""Plain vLLM, offline, asked about images: reads JSON lines from stdin, answers one line each.

`vision_engine.py FOLDER eager|compiled`.

`{"engine": arguments}` starts an engine, after ending the one before. A list of
`{"prompt": text or token ids, "images": paths, "uuids": names or null, "max_tokens": n}` is one batch; every prompt is
answered with its token ids as the model saw them, where the logprobs of its every position are (a file of numpy),
and what followed; or with the error that refused it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any


def main() -> None:
    folder = sys.argv[1]
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if eager := sys.argv[2] == "eager":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    llm = None
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        if isinstance(asked, dict):
            del llm
            gc.collect()
            llm = _engine({"enforce_eager": eager} | asked["engine"])
            print("ANSWER null", flush=True)
            continue
        print("ANSWER " + json.dumps(_answers(llm, asked, f"{folder}/{number}")), flush=True)


def _engine(args: dict[str, Any]) -> Any:
    cores, ranks = sorted(os.sched_getaffinity(0)), args.get("tensor_parallel_size", 1)
    # A thread each: with more, on a busy machine, so small a model does nothing but wait for its threads.
    if ranks > 1 or "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores[:ranks]))
    from vllm import LLM

    usual = {"dtype": "float32", "kv_cache_memory_bytes": 64 * 1024 * 1024}
    usual |= {"max_model_len": 512, "max_num_seqs": 8, "block_size": 32, "max_logprobs": -1}
    return LLM(disable_log_stats=False, **(usual | args))


def _answers(llm: Any, asked: list[dict[str, Any]], stem: str) -> list[dict[str, Any]]:
    """Together if they can be; one refusal refuses the batch, and then each is asked for itself."""
    from vllm.exceptions import VLLMClientError

    try:
        return [_told(out, f"{stem}-{at}") for at, out in enumerate(_generate(llm, asked))]
    except (ValueError, VLLMClientError) as error:
        if len(asked) == 1:
            return [{"error": f"{type(error).__name__}: {error}"}]
        return [_answers(llm, [one], f"{stem}-{at}")[0] for at, one in enumerate(asked)]


def _generate(llm: Any, asked: list[dict[str, Any]]) -> list[Any]:
    from vllm import SamplingParams

    params = [
        SamplingParams(
            max_tokens=one.get("max_tokens", 6),
            temperature=0,
            ignore_eos=True,
            logprobs=-1,
            prompt_logprobs=-1 if one.get("whole", True) else None,
        )
        for one in asked
    ]
    outputs: list[Any] = llm.generate([_prompt(one) for one in asked], params, use_tqdm=False)
    return outputs


def _prompt(one: dict[str, Any]) -> dict[str, Any]:
    from PIL import Image

    name = "prompt" if isinstance(one["prompt"], str) else "prompt_token_ids"
    prompt: dict[str, Any] = {name: one["prompt"]}
    if images := one.get("images"):
        prompt["multi_modal_data"] = {"image": [Image.open(path) for path in images]}
    if uuids := one.get("uuids"):
        prompt["multi_modal_uuids"] = {"image": uuids}
    if options := one.get("options"):
        prompt["mm_processor_kwargs"] = options
    return prompt


def _told(output: Any, stem: str) -> dict[str, Any]:
    import numpy as np

    steps = [*(output.prompt_logprobs or [])[1:], *output.outputs[0].logprobs]
    wide = max(len(step) for step in steps)
    rows = [[step[token].logprob for token in range(wide)] for step in steps]
    np.save(f"{stem}.npy", np.array(rows, dtype=np.float64))
    return {
        "ids": list(output.prompt_token_ids),
        "said": list(output.outputs[0].token_ids),
        "logprobs": f"{stem}.npy",
        "cached": output.num_cached_tokens,
    }


if __name__ == "__main__":
    main()

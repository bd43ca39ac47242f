"""Prove that two versions of vLLM have the same KV: one saves, the other loads, token for token.

    python bench/versions.py --model MODEL --saves PYTHON --loads PYTHON

Each is the interpreter of an environment with vLLM and this repository's packages; a row of
`connectors/baton_kv/versions.toml` must name both versions, and stays if they are the same. Contexts of many
lengths, aligned to blocks and not, are saved by the first; the second answers after each of them once from
the entry and once computed by itself, in float32: all tokens must be equal, and no log probability further
away than rounding. Then the same the other way round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LENGTHS = (
    1,
    31,
    32,
    33,
    63,
    64,
    65,
    95,
    96,
    100,
    127,
    128,
    129,
    160,
    200,
    255,
    256,
    257,
    319,
    320,
    400,
    511,
    512,
)
SAID = 12
ROUNDING_NATS = 0.001


def prompts(vocabulary: int) -> list[list[int]]:
    """Make prompts of these lengths, each with a beginning of its own."""
    return [
        [3 + (7 * place + 131 * number) % (vocabulary - 3) for place in range(length)]
        for number, length in enumerate(LENGTHS)
    ]


def run(role: str, model: str, store: str, told: Path) -> None:
    """Save contexts, or load them and compare, in this interpreter."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM, SamplingParams, __version__
    from vllm.inputs import TokensPrompt

    from baton_kv.contract import new_key, params_to_load, params_to_save

    transfer = {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton_kv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": f"file:{store}"},
    }
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        kv_cache_memory_bytes=256 * 1024 * 1024,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        kv_transfer_config=transfer,
    )

    def ask(prompt: list[int], params: dict[str, Any] | None) -> tuple[list[int], list[float], int]:
        sampling = SamplingParams(
            max_tokens=SAID,
            temperature=0,
            ignore_eos=True,
            logprobs=0,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        (answer,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        said = answer.outputs[0]
        near = [
            place[token].logprob for place, token in zip(said.logprobs or (), said.token_ids, strict=True)
        ]
        return list(said.token_ids), near, answer.num_cached_tokens or 0

    if role == "save":
        rows = []
        for prompt in prompts(llm.model_config.get_vocab_size()):
            key = new_key("local")
            said, _, _ = ask(prompt, params_to_save(key))
            rows.append({"key": key, "context": prompt + said})
        core = llm.llm_engine.engine_core.engine_core
        for _ in range(500):  # saves end with the steps after the answers
            core.step()
        told.write_text(json.dumps({"version": __version__, "rows": rows}))
        return
    saved = json.loads(told.read_text())
    wrong, loaded, furthest = 0, 0, 0.0
    for row in saved["rows"]:
        prompt = [*row["context"], 5, 6, 7]
        said, near, cached = ask(prompt, params_to_load(row["key"]))
        own, expected, _ = ask(prompt, None)
        loaded += cached >= len(row["context"]) - 1
        wrong += said != own
        furthest = max([furthest, *(abs(one - other) for one, other in zip(near, expected, strict=True))])
    exact = loaded == len(saved["rows"]) and not wrong and furthest <= ROUNDING_NATS
    print(
        f"saved by {saved['version']}, loaded by {__version__}: {loaded} of {len(saved['rows'])} contexts, "
        f"{wrong} wrong, furthest log probability {furthest:.1e}: {'the same' if exact else 'NOT the same'}"
    )
    if not exact:
        raise SystemExit(1)


def main() -> None:
    """Run both roles in their interpreters, there and back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--saves", default=sys.executable)
    parser.add_argument("--loads", default=sys.executable)
    parser.add_argument("--role", choices=("save", "load"))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.role:
        run(options.role, options.model, str(options.folder / "store"), options.folder / "told.json")
        return
    for first, second in ((options.saves, options.loads), (options.loads, options.saves)):
        with tempfile.TemporaryDirectory() as folder:
            for role, python in (("save", first), ("load", second)):
                command = [python, __file__, "--model", options.model, "--role", role, "--folder", folder]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

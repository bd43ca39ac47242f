"""Plain vLLM, offline: with the connector, what a process of `OfflineEngine` does, and without it."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from support.engine_threads import VARIABLE, engine_cores

RESIDENT = 256 * 1024 * 1024
"""Bytes of KV that an engine keeps in memory unless it is told otherwise, as the gateway's engines."""


def serve(questions: Connection, log: str, model: str, store: str, given: dict[str, Any]) -> None:
    """Start an engine and answer what comes, until the other end is closed.

    A question is a list of `{"prompt": token ids, "max_tokens": n, "params": kv_transfer_params or None}`, run as one
    batch; None empties the prefix cache, and `{"call": name, "args": [...]}` calls a method of the worker's extension.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' process ends this one
    with open(log, "w") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    ranks = given.get("tensor_parallel_size", 1)
    os.environ[VARIABLE] = engine_cores(ranks)
    if ranks == 1:  # all in this process, which has imported vLLM: each other one would take ten seconds more
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        given = {"distributed_executor_backend": "uni"} | given
    from vllm import LLM, SamplingParams
    from vllm.inputs import tokens_input

    transfer = {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton_kv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": f"file:{store}", "resident": given.pop("resident", RESIDENT)},
    }
    usual = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 192 * 1024 * 1024,
        "kv_transfer_config": transfer,
    }
    llm = LLM(model=model, disable_log_stats=False, **(usual | given))
    questions.send("ready")
    counts = _counts(llm)
    core = llm.llm_engine.engine_core
    while True:
        # A process of its own, as vLLM's engine core mostly is, goes on with what is saved after the answer.
        while ranks == 1 and not questions.poll(0.005):
            core.engine_core.step()
        try:
            asked = questions.recv()
        except EOFError:
            return
        if asked is None:
            llm.reset_prefix_cache()
            questions.send(None)
            continue
        if isinstance(asked, dict):
            llm.collective_rpc(asked["call"], args=tuple(asked["args"]))
            questions.send(None)
            continue
        outputs = llm.generate(
            [tokens_input(one["prompt"], cache_salt=one["salt"]) for one in asked],
            [
                SamplingParams(
                    max_tokens=one["max_tokens"],
                    temperature=0,
                    ignore_eos=True,
                    logprobs=1,
                    extra_args={"kv_transfer_params": one["params"]} if one["params"] else None,
                )
                for one in asked
            ],
            use_tqdm=False,
        )
        before, counts = counts, _counts(llm)
        told = {"answers": [_told(output) for output in outputs]}
        told |= {name: counts[name] - before[name] for name in counts}
        questions.send(told)


def complete(answers: Connection, model: str, prompts: list[str]) -> None:
    """Send what vLLM by itself says after some prompts, one at a time, in fp32 and greedily: texts and token ids."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ[VARIABLE] = engine_cores()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        distributed_executor_backend="uni",
        max_model_len=2048,
        enforce_eager=True,
        kv_cache_memory_bytes=256 * 1024 * 1024,
    )
    greedy = SamplingParams(max_tokens=24, temperature=0)
    said = [llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    answers.send([(each.text, list(each.token_ids)) for each in said])


def _counts(llm: object) -> dict[str, int]:
    """Return the scheduler's own counters."""
    found = {"computed": 0, "preempted": 0, "accepted": 0}
    for metric in llm.get_metrics():  # type: ignore[attr-defined]  # vLLM's LLM, imported late
        if metric.name == "vllm:prompt_tokens_by_source" and metric.labels["source"] == "local_compute":
            found["computed"] += metric.value
        elif metric.name == "vllm:num_preemptions":
            found["preempted"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            found["accepted"] += metric.value
    return found


def _told(output: object) -> dict[str, object]:
    said = output.outputs[0]  # type: ignore[attr-defined]  # vLLM's RequestOutput, imported late
    logprobs = [step[token].logprob for step, token in zip(said.logprobs, said.token_ids, strict=True)]
    return {
        "id": output.request_id,  # type: ignore[attr-defined]  # vLLM's RequestOutput, imported late
        "tokens": list(said.token_ids),
        "logprobs": logprobs,
        "cached": output.num_cached_tokens,  # type: ignore[attr-defined]  # as above
        "params": output.kv_transfer_params,  # type: ignore[attr-defined]  # as above
    }

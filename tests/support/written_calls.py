"""Calls of tools as families of models write them, by the name of vLLM's parser."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Call = tuple[str, dict[str, Any]]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: list[Call]) -> str:
    return "".join(
        f'\n<tool_call>\n{{"name": "{name}", "arguments": {as_json(given)}}}\n</tool_call>'
        for name, given in calls
    )


def llama(calls: list[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {as_json(given)}}}' for name, given in calls)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def qwen_xml(calls: list[Call]) -> str:
    def parameters(given: dict[str, Any]) -> str:
        return "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in given.items())

    return "".join(
        f"\n<tool_call>\n<function={name}>\n{parameters(given)}</function>\n</tool_call>"
        for name, given in calls
    )


def glm(calls: list[Call]) -> str:
    def pairs(given: dict[str, Any]) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
            for key, value in given.items()
        )

    return "".join(f"\n<tool_call>{name}\n{pairs(given)}</tool_call>" for name, given in calls)


def deepseek_v3(calls: list[Call]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[Call]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(given)}<｜tool▁call▁end｜>"
        for name, given in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def gemma(calls: list[Call]) -> str:
    def value(given: Any) -> str:
        if isinstance(given, str):
            return f'<|"|>{given}<|"|>'
        if isinstance(given, list):
            return f"[{','.join(map(value, given))}]"
        if isinstance(given, dict):
            return f"{{{','.join(f'{key}:{value(inner)}' for key, inner in given.items())}}}"
        return json.dumps(given)

    return "".join(f"<|tool_call>call:{name}{value(given)}<tool_call|>" for name, given in calls)


def granite(calls: list[Call]) -> str:
    return "<|tool_call|>" + as_json([{"name": name, "arguments": given} for name, given in calls])


def mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS]" + as_json([{"name": name, "arguments": given} for name, given in calls])


def mistral_v11(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{as_json(given)}" for name, given in calls)


def harmony(calls: list[Call]) -> str:
    return "".join(
        f"<|end|><|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json(given)}"
        for name, given in calls
    )


def dsml(block: str, space: str = "") -> Callable[[list[Call]], str]:
    def parameters(given: dict[str, Any]) -> str:
        return "".join(
            f'<｜DSML｜{space}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{plain(value)}'
            f"</｜DSML｜{space}parameter>\n"
            for key, value in given.items()
        )

    def write(calls: list[Call]) -> str:
        each = [
            f'<｜DSML｜{space}invoke name="{name}">\n{parameters(given)}</｜DSML｜{space}invoke>\n'
            for name, given in calls
        ]
        return f"\n\n<｜DSML｜{space}{block}>\n{''.join(each)}</｜DSML｜{space}{block}>"

    return write


def kimi_k2(calls: list[Call]) -> str:
    each = [
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{as_json(given)}<|tool_call_end|>"
        for at, (name, given) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


XTML = {str: "string", int: "number", float: "number", bool: "boolean", list: "array", dict: "object"}


def kimi_k3(calls: list[Call]) -> str:
    def arguments(given: dict[str, Any]) -> str:
        return "".join(
            f'<|open|>argument key="{key}" type="{XTML[type(value)]}"<|sep|>{plain(value)}<|close|>argument<|sep|>'
            for key, value in given.items()
        )

    each = [
        f'<|open|>call tool="{name}" index="{at}"<|sep|>{arguments(given)}<|close|>call<|sep|>'
        for at, (name, given) in enumerate(calls, 1)
    ]
    return f"<|close|>response<|sep|><|open|>tools<|sep|>{''.join(each)}<|close|>tools<|sep|>"


def minimax(calls: list[Call]) -> str:
    def parameters(given: dict[str, Any]) -> str:
        return "".join(
            f'<parameter name="{key}">{plain(value)}</parameter>\n' for key, value in given.items()
        )

    each = [f'<invoke name="{name}">\n{parameters(given)}</invoke>\n' for name, given in calls]
    return f"\n<minimax:tool_call>\n{''.join(each)}</minimax:tool_call>"


def seed(calls: list[Call]) -> str:
    return qwen_xml(calls).replace("tool_call>", "seed:tool_call>")


def function_gemma(calls: list[Call]) -> str:
    def pairs(given: dict[str, Any]) -> str:
        return ",".join(f"{key}:<escape>{plain(value)}<escape>" for key, value in given.items())

    return "".join(
        f"<start_function_call>call:{name}{{{pairs(given)}}}<end_function_call>" for name, given in calls
    )


def listed(calls: list[Call]) -> str:
    return as_json([{"name": name, "arguments": given} for name, given in calls])


def apertus(calls: list[Call]) -> str:
    return f"<|tools_prefix|>{as_json([{name: given} for name, given in calls])}<|tools_suffix|>"


def python(calls: list[Call]) -> list[str]:
    return [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls
    ]


def pythonic(calls: list[Call]) -> str:
    return f"[{', '.join(python(calls))}]"


def olmo(calls: list[Call]) -> str:
    return "<function_calls>" + "\n".join(python(calls)) + "</function_calls>"


def lfm(calls: list[Call]) -> str:
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


def internlm(calls: list[Call]) -> str:
    return "".join(
        f"<|action_start|><|plugin|>{as_json({'name': name, 'parameters': given})}<|action_end|>"
        for name, given in calls
    )


def step(calls: list[Call]) -> str:
    def parameters(given: dict[str, Any]) -> str:
        return "".join(
            f'<steptml:parameter name="{key}">{plain(value)}</steptml:parameter>'
            for key, value in given.items()
        )

    each = [
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{parameters(given)}</steptml:invoke>'
        "<｜tool_call_end｜>"
        for name, given in calls
    ]
    return f"<｜tool_calls_begin｜>{''.join(each)}<｜tool_calls_end｜>"


def cohere(calls: list[Call]) -> str:
    each = [
        {"tool_call_id": str(at), "tool_name": name, "parameters": given}
        for at, (name, given) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{as_json(each)}<|END_ACTION|>"


THINK = ("<think>\n", "\n</think>\n\n")
THINK_TOKENS = ("<think>", "</think>")
TAGS = ("<tool_call>", "</tool_call>")
GLM_TOKENS = (*THINK_TOKENS, *TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK_TOKENS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁sep｜>",
)
GEMMA_TOKENS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|turn>", "<turn|>")
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>")
XTML_TOKENS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
STEP_TOKENS = (
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_call_end｜>",
)
TOKENS = {
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "cohere_command3": ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    "deepseek_v3": DEEPSEEK_TOKENS,
    "deepseek_v31": DEEPSEEK_TOKENS,
    "deepseek_v32": ("｜DSML｜", *THINK_TOKENS),
    "ernie45": (*THINK_TOKENS, *TAGS, "<response>", "</response>"),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": GEMMA_TOKENS,
    "glm45": GLM_TOKENS,
    "granite": ("<|tool_call|>",),
    "internlm": ("<|action_start|>", "<|action_end|>", "<|plugin|>"),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "kimi_k2": (*SECTION, "<|tool_call_argument_begin|>", "<|tool_call_end|>", *THINK_TOKENS),
    "kimi_k3": XTML_TOKENS,
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "llama3_json": ("<|python_tag|>",),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "mistral": ("[TOOL_CALLS]",),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
    "step3": (*STEP_TOKENS, "<｜tool_sep｜>"),
}
"""The tokens of its own that a family has, as far as they matter."""
WRITTEN: dict[str, Callable[[list[Call]], str]] = {
    "apertus": apertus,
    "cohere_command3": cohere,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v41": dsml("calls", " "),
    "ernie45": hermes,
    "functiongemma": function_gemma,
    "gemma4": gemma,
    "glm45": glm,
    "granite": granite,
    "granite4": hermes,
    "hermes": hermes,
    "hunyuan_a13b": lambda calls: f"<tool_calls>{listed(calls)}</tool_calls>",
    "internlm": internlm,
    "jamba": lambda calls: f"<tool_calls>{listed(calls)}</tool_calls>",
    "kimi_k2": kimi_k2,
    "kimi_k3": kimi_k3,
    "lfm2": lfm,
    "llama3_json": llama,
    "llama4_pythonic": lambda calls: f"<|python_start|>{pythonic(calls)}<|python_end|>",
    "longcat": lambda calls: hermes(calls).replace("tool_call>", "longcat_tool_call>"),
    "mimo": lambda calls: qwen_xml(calls).replace(">\n", ">").replace("\n</", "</"),
    "minimax_m2": minimax,
    "mistral": mistral,
    "olmo3": olmo,
    "openai": harmony,
    "phi4_mini_json": lambda calls: f"functools{listed(calls)}",
    "pythonic": pythonic,
    "qwen3_xml": qwen_xml,
    "seed_oss": seed,
    "step3": step,
    "step3p5": qwen_xml,
}

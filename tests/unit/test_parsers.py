"""What takes calls and thoughts out of a model's words is chosen by its template, tokens and architecture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.config.groups import EngineSettings
from baton.doctor.machine import examine
from baton.models import parsers
from baton.models.parsers import CALLS, THOUGHTS, Evidence, Parser, choose_calls, parsers_of, read_evidence

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
OPEN = "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
SWITCH = "{% if not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
THINKS = OPEN + "{{ '<think>\\n' }}{% endif %}"
MAY_THINK = OPEN + SWITCH + "{% endif %}"
SAYS = OPEN + "{% endif %}"
JSON_CALL = '{{ "<tool_call>\\n{\\"name\\": a, \\"arguments\\": b}\\n</tool_call>" }}'
XML_CALL = "{{ '<tool_call><function=a><parameter=b>c</parameter></function></tool_call>' }}"
GLM_CALL = "{{ '<tool_call>a<arg_key>b</arg_key><arg_value>c</arg_value></tool_call>' }}"
LLAMA = """{{ 'Respond in the format {"name": function name, "parameters": dictionary}.' }}"""
DEEPSEEK = "{{ '<｜tool▁calls▁begin｜>a<｜tool▁sep｜>b<｜tool▁calls▁end｜>' }}"
DEEPSEEK_TOKENS = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]
THINK = ["<think>", "</think>"]
KIMI = "{{ '<|tool_calls_section_begin|>' }}"
MODELS: list[tuple[str, str, str, list[str], str | None, str | None]] = [
    ("Qwen2.5", "Qwen2ForCausalLM", TOOLS + JSON_CALL + SAYS, [], "hermes", None),
    ("Qwen3", "Qwen3ForCausalLM", TOOLS + JSON_CALL + MAY_THINK, THINK, "hermes", "qwen3"),
    ("Qwen3 Instruct", "Qwen3MoeForCausalLM", TOOLS + JSON_CALL + SAYS, THINK, "hermes", None),
    ("Qwen3 Thinking", "Qwen3MoeForCausalLM", TOOLS + JSON_CALL + THINKS, THINK, "hermes", "qwen3"),
    ("Qwen3 Coder", "Qwen3MoeForCausalLM", TOOLS + XML_CALL + SAYS, THINK, "qwen3_xml", None),
    ("Qwen3.5", "Qwen3_5ForCausalLM", TOOLS + XML_CALL + MAY_THINK, THINK, "qwen3_xml", "qwen3"),
    ("QwQ", "Qwen2ForCausalLM", TOOLS + JSON_CALL + THINKS, THINK, "hermes", "deepseek_r1"),
    ("Hermes", "LlamaForCausalLM", TOOLS + JSON_CALL + SAYS, [], "hermes", None),
    ("gpt-oss", "GptOssForCausalLM", TOOLS + SAYS, [], "openai", "openai_gptoss"),
    ("Llama 3", "LlamaForCausalLM", TOOLS + LLAMA + SAYS, ["<|python_tag|>"], "llama3_json", None),
    ("Llama 3 elsewhere", "LlamaForCausalLM", TOOLS + LLAMA + SAYS, [], None, None),
    (
        "Llama 4",
        "Llama4ForConditionalGeneration",
        TOOLS + "{{ '[func_name1(a=b)]' }}",
        [],
        "llama4_pythonic",
        None,
    ),
    ("Mistral", "MistralForCausalLM", TOOLS + "{{ '[TOOL_CALLS]' }}", ["[TOOL_CALLS]"], "mistral", None),
    (
        "DeepSeek V3",
        "DeepseekV3ForCausalLM",
        TOOLS + DEEPSEEK + "{{ '```json' }}" + SAYS,
        [*THINK, *DEEPSEEK_TOKENS],
        "deepseek_v3",
        None,
    ),
    (
        "DeepSeek V3.1",
        "DeepseekV3ForCausalLM",
        TOOLS + DEEPSEEK + OPEN + "{{ '<think>' if thinking else '</think>' }}{% endif %}",
        [*THINK, *DEEPSEEK_TOKENS],
        "deepseek_v31",
        "deepseek_v3",
    ),
    ("DeepSeek R1", "DeepseekV3ForCausalLM", THINKS, THINK, None, "deepseek_r1"),
    ("DeepSeek V3.2", "DeepseekV32ForCausalLM", "", [], "deepseek_v32", "deepseek_v3"),
    ("R1 in Llama", "LlamaForCausalLM", THINKS, THINK, None, "deepseek_r1"),
    ("GLM 4.5", "Glm4MoeForCausalLM", TOOLS + GLM_CALL + MAY_THINK, THINK, "glm45", "glm45"),
    ("calls like GLM's", "SomeForCausalLM", TOOLS + GLM_CALL + SAYS, [], None, None),
    ("Gemma 3", "Gemma3ForCausalLM", SAYS, [], None, None),
    (
        "Gemma 4",
        "Gemma4ForConditionalGeneration",
        TOOLS + "{{ '<|tool_call>a<tool_call|><|channel>' }}{{ enable_thinking }}",
        [],
        "gemma4",
        "gemma4",
    ),
    ("Granite 3", "GraniteForCausalLM", TOOLS + "{{ '<|tool_call|>' }}" + SAYS, [], "granite", None),
    ("Granite 4", "GraniteMoeHybridForCausalLM", TOOLS + JSON_CALL + SAYS, [], "granite4", None),
    ("Phi-4-mini", "Phi3ForCausalLM", TOOLS + "{{ 'functools[' }}", [], "phi4_mini_json", None),
    ("Kimi K2", "DeepseekV3ForCausalLM", TOOLS + KIMI + SAYS, THINK, "kimi_k2", None),
    ("Kimi K2 Thinking", "DeepseekV3ForCausalLM", TOOLS + KIMI + THINKS, THINK, "kimi_k2", "kimi_k2"),
    (
        "MiniMax M2",
        "MiniMaxM2ForCausalLM",
        TOOLS + "{{ '<minimax:tool_call>' }}" + THINKS,
        THINK,
        "minimax_m2",
        "minimax_m2",
    ),
    (
        "Seed-OSS",
        "SeedOssForCausalLM",
        TOOLS + "{{ '<seed:tool_call><function=a><seed:think>' }}",
        ["<seed:think>", "</seed:think>"],
        "seed_oss",
        "seed_oss",
    ),
    ("a switch of nobody's", "SomeForCausalLM", TOOLS + JSON_CALL + MAY_THINK, THINK, "hermes", None),
    ("no tokens to think", "Qwen3ForCausalLM", TOOLS + JSON_CALL + THINKS, [], "hermes", None),
    ("calls, and no tools", "Qwen2ForCausalLM", JSON_CALL + SAYS, [], None, None),
    ("tools of messages alone", "Phi3ForCausalLM", "{{ message['tools'] }}{{ m.tools }}", [], None, None),
    ("tools in a comment", "Qwen2ForCausalLM", "{# tools #}" + JSON_CALL, [], None, None),
    ("no template", "LlamaForCausalLM", "", [], None, None),
]


def model(folder: Path, architecture: str, template: str, tokens: list[str]) -> Path:
    """A model's description, without weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    added = [{"id": at, "content": token, "special": True} for at, token in enumerate(tokens)]
    vocabulary = {"model": {"vocab": {"a": 1}}}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added} | vocabulary))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def names(folder: Path, **given: Any) -> tuple[str | None, str | None]:
    found = parsers_of(EngineSettings(name="a", model=str(folder), **given), str(folder))
    assert found.calls.why
    assert found.thoughts.why
    return found.calls.name, found.thoughts.name


@pytest.mark.parametrize(
    ("architecture", "template", "tokens", "calls", "thoughts"),
    [row[1:] for row in MODELS],
    ids=[row[0] for row in MODELS],
)
def test_a_family_is_told_by_what_it_writes(
    tmp_path: Path,
    architecture: str,
    template: str,
    tokens: list[str],
    calls: str | None,
    thoughts: str | None,
) -> None:
    assert names(model(tmp_path / "m", architecture, template, tokens)) == (calls, thoughts)


def test_off_and_a_name_win(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", "Qwen3ForCausalLM", TOOLS + JSON_CALL + MAY_THINK, THINK)
    off = {"tool_call_parser": "off", "reasoning_parser": "off"}
    assert names(folder, serving=off) == (None, None)
    assert names(folder, serving=dict.fromkeys(off, "auto")) == ("hermes", "qwen3")
    assert names(folder, serving={"tool_call_parser": "xlam"}) == ("xlam", "qwen3")
    assert names(folder, args={"reasoning_parser": "off"}) == ("hermes", None)
    assert names(folder, args={"reasoning_parser": "olmo3"}) == ("hermes", "olmo3")
    within = {"structured_outputs_config": {"reasoning_parser": "olmo3"}}
    assert names(folder, args=within) == ("hermes", "olmo3")
    assert names(folder, runner="pooling") == (None, None)


def test_the_template_of_the_settings_is_the_one_that_counts(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", "LlamaForCausalLM", SAYS, [])
    file = tmp_path / "own.jinja"
    file.write_text(TOOLS + JSON_CALL)
    assert names(folder) == (None, None)
    for given in (str(file), TOOLS + JSON_CALL):
        assert names(folder, serving={"chat_template": given}) == ("hermes", None)


@pytest.mark.parametrize("kind", ["jinja", "more", "json", "config", "list"])
def test_a_template_is_found_wherever_it_stands(tmp_path: Path, kind: str) -> None:
    folder = model(tmp_path / "m", "LlamaForCausalLM", "", [])
    text = TOOLS + JSON_CALL
    if kind == "more":
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(SAYS)
    listed = [{"name": "default", "template": SAYS}, {"name": "tool_use", "template": text}]
    file, content = {
        "jinja": ("chat_template.jinja", text),
        "more": ("additional_chat_templates/tool_use.jinja", text),
        "json": ("chat_template.json", json.dumps({"chat_template": text})),
        "config": ("tokenizer_config.json", json.dumps({"chat_template": text})),
        "list": ("tokenizer_config.json", json.dumps({"chat_template": listed})),
    }[kind]
    (folder / file).write_text(content)
    assert names(folder) == ("hermes", None)


def test_added_tokens_are_found_in_the_older_files_too(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", "LlamaForCausalLM", TOOLS + LLAMA, [])
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({"added_tokens_decoder": {"5": {"content": "<|python_tag|>"}}}))
    assert names(folder) == ("llama3_json", None)
    file.unlink()
    (folder / "added_tokens.json").write_text(json.dumps({"<|python_tag|>": 5}))
    assert names(folder) == ("llama3_json", None)


def test_mistral_s_own_form_needs_no_template(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", "MistralForCausalLM", "", [])
    special = [{"token_str": "[THINK]"}, {"token_str": "[/THINK]"}]
    (folder / "tekken.json").write_text(json.dumps({"special_tokens": special}))
    assert names(folder) == ("mistral", "mistral")
    (folder / "tekken.json").write_text("{}")
    assert names(folder) == ("mistral", None)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"added_tokens": 5}', "[" * 100_000, "\x00\xff"])
def test_files_that_cannot_be_read_say_nothing(tmp_path: Path, content: str) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.json"):
        (tmp_path / name).write_text(content)
    assert names(tmp_path) == (None, None)
    assert names(tmp_path / "nowhere") == (None, None)


def test_a_parser_that_the_tokenizer_cannot_serve_is_not_chosen_and_that_is_told(tmp_path: Path) -> None:
    evidence = read_evidence(model(tmp_path / "m", "LlamaForCausalLM", TOOLS + LLAMA, []))
    assert choose_calls(evidence) == Parser(
        None, "its calls are written like Llama 3.1, 3.2, 3.3, but its tokenizer lacks <|python_tag|>"
    )


def test_a_parser_whose_package_is_missing_is_not_chosen_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evidence = Evidence("Cohere2ForCausalLM", TOOLS + "{{ '<|START_ACTION|>' }}")
    monkeypatch.setattr(parsers, "find_spec", lambda _name: None)
    found = choose_calls(evidence)
    assert (found.name, "`cohere_melody`" in found.why) == (None, True)
    monkeypatch.setattr(parsers, "find_spec", lambda name: name)
    assert choose_calls(evidence).name == "cohere_command3"


def test_of_a_hub_s_model_the_files_that_are_here_are_read(tmp_path: Path) -> None:
    kept = tmp_path / "models--org--m"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots").mkdir()
    model(kept / "snapshots" / "abc", "Qwen2ForCausalLM", TOOLS + JSON_CALL, [])
    code = (
        "from baton.models.parsers import parsers_of; from baton.config.groups import EngineSettings;"
        "print(*(parsers_of(EngineSettings(name='a', model=m), m).calls.name for m in ('org/m', 'org/n')))"
    )
    away = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    said = subprocess.run([sys.executable, "-c", code], env=away, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["hermes", "None"]


def test_the_doctor_says_what_is_chosen_and_why(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", "Qwen2ForCausalLM", TOOLS + JSON_CALL, [])
    settings = tmp_path / "baton.toml"
    settings.write_text(f'[[engines]]\nname = "a"\nmodel = "{folder}"\n')
    (found,) = [finding for finding in examine(settings) if finding.subject == "engine a"]
    assert not found.bad
    assert found.text == (
        'tool_call_parser: hermes (its chat template has <tool_call>, "name", "arguments"); '
        "reasoning_parser: none (its chat template knows no thoughts)"
    )


@pytest.mark.fault("E24")
def test_a_parser_on_a_template_that_writes_no_tools_is_doubted(tmp_path: Path) -> None:
    settings = tmp_path / "baton.toml"
    named = {"tool_call_parser": "hermes"}
    for number, (template, doubted) in enumerate([(SAYS, True), ("", True), (TOOLS + SAYS, False)]):
        folder = model(tmp_path / str(number), "Qwen2ForCausalLM", template, [])
        found = parsers_of(EngineSettings(name="a", model=str(folder), serving=named), str(folder)).calls
        assert (found.name, bool(found.doubt)) == ("hermes", doubted)
        assert ("doubt" in found.card()) is doubted
        settings.write_text(
            f'[[engines]]\nname = "a"\nmodel = "{folder}"\nserving = {{ tool_call_parser = "hermes" }}\n'
        )
        (finding,) = [finding for finding in examine(settings) if finding.subject == "engine a"]
        assert finding.bad is doubted
        assert ("writes no tools" in finding.text) is doubted
        assert ("serving.chat_template" in finding.mend) is doubted
    folder = model(tmp_path / "gpt-oss", "GptOssForCausalLM", "", [])
    for serving in ({"tool_call_parser": "openai"}, {"tool_call_parser": "off"}):
        settled = parsers_of(EngineSettings(name="a", model=str(folder), serving=serving), str(folder))
        assert not settled.calls.doubt


def test_the_choice_needs_no_vllm() -> None:
    code = (
        "import sys; from baton.models.parsers import parsers_of; from baton.config.groups import EngineSettings;"
        "parsers_of(EngineSettings(name='a', model='m'), '/nowhere');"
        "sys.exit(bool({'vllm', 'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_family_is_told_apart_once() -> None:
    for families in (CALLS, THOUGHTS):
        assert len({family.name for family in families}) == len(families)

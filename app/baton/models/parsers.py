"""Choose the parsers of an engine: what takes calls of tools and thoughts out of what its model writes.

A model's files say how it writes both: its chat template, its tokenizer's added tokens, and its architecture
where these two leave a doubt. What is in doubt all the same gets no parser, and the reason is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from baton.config.groups import EngineSettings
from baton.models.catalog import EMBEDDED

AUTO = "auto"
OFF = "off"
TOOL_PARSER = "tool_call_parser"
REASONING_PARSER = "reasoning_parser"
DESCRIPTIONS = (
    *("config.json", "tokenizer_config.json", "tokenizer.json", "tekken.json", "tokenizer.model.v*"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
"""The files of a model that are read here, or tell by being there."""
UNWRITTEN = "its chat template writes no tools"
TOKENS_WITHIN = 8 * 1024 * 1024
"""Bytes of a `tokenizer.json` that are read: its added tokens come before its vocabulary."""

COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
EXPRESSION = re.compile(r"\{[{%].*?[}%]\}", re.DOTALL)
TOOLS = re.compile(r"""(?<![\w.'"])tools(?![\w'"])""")
"""The variable that holds a request's tools, not a key of a message."""


@dataclass(frozen=True)
class Family:
    """A family of models: how it is told, and the parser for what it writes.

    Attributes:
        name: what people call the models.
        parser: vLLM's name of the parser.
        written: what the chat template has, all of it.
        absent: what it has not.
        opens: what it has where it begins the answer.
        tokens: tokens that the tokenizer must have.
        architectures: beginnings of the architecture's name; empty: any.
        templateless: whether vLLM writes the prompts itself, so that no template is asked.
        package: what the parser imports, and vLLM does not bring; empty: nothing.
    """

    name: str
    parser: str
    written: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    opens: str = ""
    tokens: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    templateless: bool = False
    package: str = ""


THINK = ("<think>", "</think>")
DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
GLM = ("Glm4Moe", "GlmMoeDsa", "Glm4vMoe", "Glm5Next")
KIMI_CALLS = "<|tool_calls_section_begin|>"

CALLS: tuple[Family, ...] = (
    Family("gpt-oss", "openai", architectures=("GptOss",), templateless=True),
    Family("DeepSeek V3.2", "deepseek_v32", architectures=("DeepseekV32For",), templateless=True),
    Family("DeepSeek V4", "deepseek_v4", architectures=("DeepseekV4For",), templateless=True),
    Family("DeepSeek V4.1", "deepseek_v41", architectures=("DeepseekV41For",), templateless=True),
    Family("Kimi K3", "kimi_k3", architectures=("KimiK3For",), templateless=True),
    Family("Mistral, Ministral, Magistral", "mistral", ("[TOOL_CALLS]",), tokens=("[TOOL_CALLS]",)),
    Family("DeepSeek V3, R1", "deepseek_v3", (DEEPSEEK_CALLS[0], "```json"), tokens=DEEPSEEK_CALLS),
    Family("DeepSeek V3.1", "deepseek_v31", (DEEPSEEK_CALLS[0],), absent=("```json",), tokens=DEEPSEEK_CALLS),
    Family("Kimi K2", "kimi_k2", (KIMI_CALLS,)),
    Family("MiniMax M2", "minimax_m2", ("<minimax:tool_call>",)),
    Family("Seed-OSS", "seed_oss", ("<seed:tool_call>",)),
    Family("Gemma 4", "gemma4", ("<|tool_call>", "<tool_call|>")),
    Family("FunctionGemma", "functiongemma", ("<start_function_call>",)),
    Family("Apertus", "apertus", ("<|tools_prefix|>",)),
    Family("LFM2", "lfm2", ("<|tool_call_start|>",), tokens=("<|tool_call_start|>", "<|tool_call_end|>")),
    Family("InternLM 2.5", "internlm", ("<|action_start|>", "<|plugin|>")),
    Family("LongCat", "longcat", ("<longcat_tool_call>",)),
    Family("Step 3", "step3", ("<｜tool_calls_begin｜>",)),
    Family(
        "Command A, Command R7B",
        "cohere_command3",
        ("<|START_ACTION|>",),
        architectures=("Cohere2For",),
        package="cohere_melody",
    ),
    Family("Granite 3", "granite", ("<|tool_call|>",), architectures=("Granite",)),
    Family("Granite 4", "granite4", ("<tool_call>", "arguments"), architectures=("GraniteMoeHybrid",)),
    Family("Phi-4-mini", "phi4_mini_json", ("functools",), architectures=("Phi3For", "Phi4")),
    Family("OLMo 3", "olmo3", ("<function_calls>",), architectures=("Olmo3For",)),
    Family(
        "Jamba",
        "jamba",
        ("<tool_calls>",),
        tokens=("<tool_calls>", "</tool_calls>"),
        architectures=("Jamba",),
    ),
    Family("Hunyuan A13B", "hunyuan_a13b", ("<tool_calls>",), architectures=("HunYuanMoE",)),
    Family("Llama 4", "llama4_pythonic", ("func_name1(",), architectures=("Llama4",)),
    Family("Llama 3.2, ToolACE, Gemma 3, told to write Python", "pythonic", ("func_name1(",)),
    Family("Llama 3.1, 3.2, 3.3", "llama3_json", ('{"name": function name',), tokens=("<|python_tag|>",)),
    Family("GLM 4.5 to 5", "glm45", ("<tool_call>", "<arg_key>", "<arg_value>"), architectures=GLM),
    Family("MiMo V2", "mimo", ("<tool_call>", "<function="), architectures=("MiMoV2",)),
    Family("Step 3.5", "step3p5", ("<tool_call>", "<function="), architectures=("Step3p5",)),
    Family(
        "Qwen3 Coder, Qwen3.5, Nemotron 3",
        "qwen3_xml",
        ("<tool_call>", "<function=", "<parameter="),
        architectures=("Qwen3", "NemotronH"),
    ),
    Family("ERNIE 4.5", "ernie45", ("<tool_call>",), architectures=("Ernie4_5",)),
    Family(
        "Qwen 2.5, Qwen3, Hermes, SmolLM and others that write JSON within `<tool_call>`",
        "hermes",
        ("<tool_call>", '"name"', '"arguments"'),
        absent=("<arg_key>", "<function="),
    ),
)
"""The families whose calls are known; the first that fits decides."""

THOUGHTS: tuple[Family, ...] = (
    Family("gpt-oss", "openai_gptoss", architectures=("GptOss",), templateless=True),
    Family("DeepSeek V3.2", "deepseek_v3", architectures=("DeepseekV32For",), templateless=True),
    Family("DeepSeek V4", "deepseek_v4", architectures=("DeepseekV4For",), templateless=True),
    Family("DeepSeek V4.1", "deepseek_v41", architectures=("DeepseekV41For",), templateless=True),
    Family("Kimi K3", "kimi_k3", architectures=("KimiK3For",), templateless=True),
    Family("Magistral", "mistral", ("[THINK]",), tokens=("[TOOL_CALLS]", "[THINK]", "[/THINK]")),
    Family("Gemma 4", "gemma4", ("<|channel>", "enable_thinking"), architectures=("Gemma4",)),
    Family("Seed-OSS", "seed_oss", ("<seed:think>",), tokens=("<seed:think>", "</seed:think>")),
    Family("Granite 3.2, 3.3", "granite", ("Here is my thought process:",), architectures=("Granite",)),
    Family(
        "Command A Reasoning",
        "cohere_command3",
        ("<|START_THINKING|>",),
        tokens=("<|START_THINKING|>", "<|END_THINKING|>"),
        architectures=("Cohere2For",),
        package="cohere_melody",
    ),
    Family("Kimi K2 Thinking", "kimi_k2", (KIMI_CALLS, "<think>"), tokens=THINK),
    Family("MiniMax M2", "minimax_m2", opens="<think>", tokens=THINK, architectures=("MiniMaxM2",)),
    Family("GLM 4.5 to 5", "glm45", opens="<think>", tokens=THINK, architectures=GLM),
    Family("MiMo V2", "mimo", opens="<think>", tokens=THINK, architectures=("MiMoV2",)),
    Family("Step 3.5", "step3p5", opens="<think>", tokens=THINK, architectures=("Step3p5",)),
    Family("OLMo 3 Think", "olmo3", opens="<think>", architectures=("Olmo3For",)),
    Family(
        "Nemotron 3",
        "nemotron_v3",
        ("<function=",),
        opens="<think>",
        tokens=THINK,
        architectures=("NemotronH",),
    ),
    Family("Qwen3", "qwen3", opens="<think>", tokens=THINK, architectures=("Qwen3",)),
    Family(
        "DeepSeek V3.1",
        "deepseek_v3",
        ("thinking",),
        opens="</think>",
        tokens=THINK,
        architectures=("DeepseekV3For",),
    ),
    Family(
        "DeepSeek R1 and what was distilled from it, QwQ, others that always think first",
        "deepseek_r1",
        absent=("enable_thinking", "</think>\\n\\n"),
        opens="<think>",
        tokens=THINK,
    ),
)
"""The families whose thoughts are known; the first that fits decides."""


@dataclass(frozen=True)
class Parser:
    """The parser of an engine for calls or for thoughts.

    Attributes:
        name: vLLM's name; None: there is none.
        why: why that one.
        doubt: why it finds nothing, although the settings name it; empty: nothing speaks against it.
    """

    name: str | None
    why: str
    doubt: str = ""

    def card(self) -> dict[str, str | None]:
        """Describe it for the log and `/v1/models`."""
        return {"name": self.name, "why": self.why} | ({"doubt": self.doubt} if self.doubt else {})


@dataclass(frozen=True)
class Parsers:
    """Both parsers of an engine."""

    calls: Parser
    thoughts: Parser

    def cards(self) -> dict[str, dict[str, str | None]]:
        """Describe both for the log and `/v1/models`, by the names of the settings."""
        return {TOOL_PARSER: self.calls.card(), REASONING_PARSER: self.thoughts.card()}

    def line(self) -> str:
        """Describe both in a line, for `baton doctor`."""
        return "; ".join(
            f"{key}: {parser.name or 'none'} ({'; but '.join(filter(None, (parser.why, parser.doubt)))})"
            for key, parser in ((TOOL_PARSER, self.calls), (REASONING_PARSER, self.thoughts))
        )


@dataclass(frozen=True)
class Evidence:
    """The traces in a model's files of how it writes.

    Attributes:
        architecture: of `config.json`; empty: not known.
        template: the chat template, or all of them; empty: there is none.
        tokens: the tokenizer's added tokens.
        mistral: whether the tokenizer is in Mistral's own form.
    """

    architecture: str = ""
    template: str = ""
    tokens: frozenset[str] = frozenset()
    mistral: bool = False

    @property
    def takes_tools(self) -> bool:
        """Return whether the template writes the tools of a request."""
        return any(TOOLS.search(found) for found in EXPRESSION.findall(COMMENT.sub("", self.template)))

    def fits(self, family: Family) -> bool:
        """Return whether a model with this evidence is of a family."""
        if family.architectures and not self.architecture.startswith(family.architectures):
            return False
        if family.templateless:
            return True
        begins = self.template.rpartition("add_generation_prompt")[2]
        return (
            all(mark in self.template for mark in family.written)
            and not any(mark in self.template for mark in family.absent)
            and family.opens in begins
        )

    def choose(self, families: Sequence[Family], what: str) -> Parser:
        """Choose the parser of the first family that fits; one whose tokens are missing cannot be used."""
        for family in families:
            if not self.fits(family):
                continue
            if missing := [token for token in family.tokens if token not in self.tokens]:
                return Parser(None, f"{what} like {family.name}, but its tokenizer lacks {missing[0]}")
            if family.package and find_spec(family.package) is None:
                return Parser(None, f"{what} like {family.name}, whose parser needs `{family.package}` (pip)")
            if family.templateless:
                return Parser(family.parser, f"its architecture is {self.architecture}")
            marks = ", ".join(dict.fromkeys(mark for mark in (*family.written, family.opens) if mark))
            of = f", its architecture is {self.architecture}" if family.architectures else ""
            return Parser(family.parser, f"its chat template has {marks}{of}")
        return Parser(None, f"{what} in no form that is known for certain")


def parsers_of(settings: EngineSettings, model: str) -> Parsers:
    """Choose the parsers of an engine: those that its settings name, else by its model's files.

    Nothing is fetched: of a hub's model the files that are here already are read.

    Args:
        model: path of its weights, or a hub's name for them.
    """
    config = settings.args.get("structured_outputs_config")
    config = config if isinstance(config, dict) else vars(config) if config is not None else {}
    holders = (settings.serving, settings.args, config)
    thoughts = _named(next((found for each in holders if (found := each.get(REASONING_PARSER))), None))
    calls = _named(settings.serving.get(TOOL_PARSER))
    if settings.runner != "generate":
        none = Parser(None, "the engine writes no text")
        return Parsers(calls or none, thoughts or none)
    folder = _folder(settings, model)
    if folder is None:
        none = Parser(None, "its model's files are not here yet")
        return Parsers(calls or none, thoughts or none)
    evidence = read_evidence(folder, serving_of(settings).get("chat_template"))
    if calls is not None and calls.name is not None and not _may_call(evidence):
        calls = replace(calls, doubt=f"{UNWRITTEN}: no request's tools reach the model")
    return Parsers(calls or choose_calls(evidence), thoughts or choose_thoughts(evidence))


def serving_of(settings: EngineSettings) -> dict[str, Any]:
    """Return an engine's serving options: those of its embedded model, and the settings' over them."""
    known = EMBEDDED.get(settings.model)
    return dict(known.serving if known is not None else {}) | settings.serving


def choose_calls(evidence: Evidence) -> Parser:
    """Choose the parser for calls of tools."""
    if evidence.mistral:
        return Parser("mistral", "its tokenizer is in Mistral's own form")
    if _may_call(evidence):
        return evidence.choose(CALLS, "its calls are written")
    return Parser(None, UNWRITTEN if evidence.template else "it has no chat template")


def _may_call(evidence: Evidence) -> bool:
    """Return whether the tools of a request get into the prompt."""
    templateless = any(family.templateless and evidence.fits(family) for family in CALLS)
    return evidence.mistral or templateless or evidence.takes_tools


def choose_thoughts(evidence: Evidence) -> Parser:
    """Choose the parser for thoughts."""
    if evidence.mistral:
        if {"[THINK]", "[/THINK]"} <= evidence.tokens:
            return Parser("mistral", "its tokenizer is in Mistral's own form, with [THINK]")
        return Parser(None, "its tokenizer has no [THINK]")
    found = evidence.choose(THOUGHTS, "its thoughts are written")
    if found.name is None and not re.search("think|thought", evidence.template, re.IGNORECASE):
        return Parser(None, "its chat template knows no thoughts")
    return found


def read_evidence(folder: Path, template: str | Path | None = None) -> Evidence:
    """Read what the files of a model say; a file that cannot be read says nothing.

    Args:
        template: the chat template in place of the model's own: a file, or the text itself.
    """
    config, tokenizer = _json(folder / "config.json"), _json(folder / "tokenizer_config.json")
    architectures = config.get("architectures")
    return Evidence(
        str(architectures[0]) if isinstance(architectures, list) and architectures else "",
        (_template(folder, tokenizer) if template is None else _given_template(template)).replace('\\"', '"'),
        frozenset(_tokens(folder, tokenizer)),
        any(folder.glob("tekken.json")) or any(folder.glob("tokenizer.model.v[2-9]*")),
    )


def fetch_descriptions(settings: EngineSettings, model: str) -> None:
    """Fetch the small files of a hub's model that the choice reads, as vLLM does when it starts.

    What cannot be fetched is told by vLLM, which needs it more.
    """
    name = str(settings.args.get("tokenizer") or model)
    if settings.runner != "generate" or not _is_of_a_hub(name):
        return
    from huggingface_hub import snapshot_download  # takes a while to import, and most need it not

    try:
        snapshot_download(name, revision=_revision(settings), allow_patterns=list(DESCRIPTIONS))
    except Exception:  # noqa: BLE001  # whatever the hub's library raises: vLLM says it better
        return


def _named(given: object) -> Parser | None:
    """Return the parser that the settings name; None: they leave the choice to us."""
    if given is None or given == AUTO:
        return None
    if given == OFF:
        return Parser(None, "the settings say off")
    return Parser(str(given), "the settings name it")


def _is_of_a_hub(name: str) -> bool:
    """Return whether a model's name is one of a hub's, `owner/model`, and nothing of this machine."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def _revision(settings: EngineSettings) -> str | None:
    revision = settings.args.get("tokenizer_revision") or settings.args.get("revision")
    return str(revision) if revision else None


def _folder(settings: EngineSettings, model: str) -> Path | None:
    """Find the folder with the model's files: its own, or the hub's cache. None: they are not here."""
    name = str(settings.args.get("tokenizer") or model)
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    if not _is_of_a_hub(name):
        return None
    from huggingface_hub import try_to_load_from_cache  # takes a while to import, and most need it not
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=_revision(settings))
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _template(folder: Path, tokenizer: dict[str, Any]) -> str:
    """Return a model's chat template; where it has several, all of them."""
    files = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    if texts := [_text(file) for file in files if file.is_file()]:
        return "\n".join(reversed(texts))  # the usual one last: it says how answers begin
    found = _json(folder / "chat_template.json").get("chat_template") or tokenizer.get("chat_template")
    if isinstance(found, list):
        texts = [str(each.get("template", "")) for each in reversed(found) if isinstance(each, dict)]
        return "\n".join(texts)
    return found if isinstance(found, str) else ""


def _given_template(given: str | Path) -> str:
    """Return a template that the settings give; as vLLM does, what names no file is the text."""
    try:
        return Path(given).read_text()
    except (OSError, ValueError):
        return str(given)


def _text(file: Path) -> str:
    return file.read_text(errors="replace")


def _tokens(folder: Path, tokenizer: dict[str, Any]) -> set[str]:
    """Return the added tokens of a tokenizer."""
    known = tokenizer.get("added_tokens_decoder")
    listed = list(known.values()) if isinstance(known, dict) else []
    listed += _added_tokens(folder / "tokenizer.json")
    listed += [{"content": name} for name in _json(folder / "added_tokens.json")]
    special = _json(folder / "tekken.json").get("special_tokens")
    listed += [{"content": each.get("token_str")} for each in special or () if isinstance(each, dict)]
    return {str(each["content"]) for each in listed if isinstance(each, dict) and each.get("content")}


def _added_tokens(file: Path) -> list[Any]:
    """Return the added tokens of a `tokenizer.json`, without reading its vocabulary."""
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            text = stream.read(TOKENS_WITHIN)
        start = text.index("[", text.index('"added_tokens"'))
        found, _ = json.JSONDecoder().raw_decode(text, start)
    except (OSError, ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []

"""Write the reference pages that are made from the code: `python docs/reference_pages.py`.

Settings, errors, metrics, routes, commands, vLLM's flags, the handoff object, the families of models and the
fault catalogue. What
the code does not say stands in `reference/notes.toml` and `reference/faults.toml`. A test fails when a page
differs from what this script writes; `make docs-reference` rewrites them all.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import fault_tests
import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from vllm.tool_parsers import ToolParserManager

from baton import errors
from baton.cli import app as command
from baton.config.groups import EngineSettings, Frozen, RemoteSettings
from baton.config.settings import Settings
from baton.engines.fake.engine import FakeEngine
from baton.engines.fleet import Fleet
from baton.engines.vllm.calls import Block
from baton.engines.vllm.parsers import FORMS, TAGS
from baton.models.parsers import CALLS, THOUGHTS, Family
from baton.relay.report import MISSES
from baton.server import create_app
from baton.telemetry.metrics import GatewayMetrics, RemoteMetrics, TransferMetrics
from baton_kv.families import Family as CacheFamily
from baton_kv.families import Support

DOCS = Path(__file__).parent
REFERENCE = DOCS / "reference"
NOTES = tomllib.loads((REFERENCE / "notes.toml").read_text())
FAULTS = tomllib.loads((REFERENCE / "faults.toml").read_text())
HEAD = "<!-- Made from the code by docs/reference_pages.py; `make docs-reference` makes it again. -->\n\n"
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
CODE_SUFFIX = {"Counter": "_total", "Info": "_info"}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; a bar within a cell is escaped."""
    lines = [list(head), ["---"] * len(list(head)), *[list(row) for row in rows]]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def sentence(text: str) -> str:
    """Return a text as a sentence on one line."""
    text = " ".join(text.split())
    return text if not text or text.endswith((".", "!", "?", "...")) else f"{text}."


def page(name: str, title: str, *parts: str) -> str:
    """Return a whole page: heading, the introduction in `notes.toml`, and the parts."""
    intro = NOTES["introductions"].get(name, "").strip()
    return HEAD + "\n\n".join(part for part in (f"# {title}", intro, *parts) if part) + "\n"


def shown_default(field: FieldInfo) -> str:
    """Return a setting's default as it would be written in TOML; empty: it must be given."""
    if field.default_factory is not None:
        return "`{}`" if field.annotation in (dict, dict[str, Any]) else "see below"
    default = field.default
    if isinstance(default, Frozen):
        return "see below"
    if default is PydanticUndefined:
        return ""
    if default is None:
        return "unset"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, ByteSize):
        return f"`{default.human_readable().replace('.0', '')}`"
    return "`[]`" if default == () else f"`{default}`"


def shown_bounds(field: FieldInfo) -> str:
    """Return the bounds of a setting as a sentence, for example "At least 1, at most 64."."""
    words = []
    for bound in field.metadata:
        for name, word in BOUNDS.items():
            value = getattr(bound, name, None)
            if value is not None:
                size = any(kind is ByteSize for kind in (field.annotation, *get_args(field.annotation)))
                words.append(
                    f"{word} {ByteSize(value).human_readable().replace('.0', '') if size else value}"
                )
    text = ", ".join(words)
    return f" {text[:1].upper()}{text[1:]}." if words else ""


def settings_rows(prefix: str, fields: dict[str, FieldInfo]) -> list[list[str]]:
    """Return one row for each setting of a table of the settings file."""
    return [
        [
            f"`{prefix}{name}`",
            shown_default(field),
            sentence(field.description or "") + shown_bounds(field),
        ]
        for name, field in fields.items()
    ]


def settings_page() -> str:
    """Return the page of all settings, one table a group."""
    head = ("setting", "default", "what it is")
    plain: dict[str, FieldInfo] = {}
    parts = []
    for name, field in Settings.model_fields.items():
        kind = EngineSettings if name == "engines" else field.annotation
        if not (isinstance(kind, type) and issubclass(kind, Frozen)):
            plain[name] = field
            continue
        heading = f"## `[[{name}]]`" if name == "engines" else f"## `[{name}]`"
        about = sentence((kind.__doc__ or "").partition(": ")[2])
        about = about[:1].upper() + about[1:]
        more = sentence(field.description or "") + NOTES["settings"].get(name, "")
        prefix = f"{name}."
        parts += [heading, about, more, table(head, settings_rows(prefix, kind.model_fields))]
        if name == "engines":
            about = sentence((RemoteSettings.__doc__ or "").partition(": ")[2])
            rows = settings_rows("engines.remote.", RemoteSettings.model_fields)
            more = NOTES["settings"]["remote"].strip()
            parts += ["## `[engines.remote]`", about[:1].upper() + about[1:], more, table(head, rows)]
    return page(
        "settings", "Settings", "## Of the whole gateway", table(head, settings_rows("", plain)), *parts
    )


def answered(root: type[errors.BatonError] = errors.BatonError) -> list[type[errors.BatonError]]:
    """Return every error class that a client can be answered with."""
    found = []
    for kind in root.__subclasses__():
        if not issubclass(kind, errors.OperatorError):
            if kind not in (errors.ClientError, errors.ServerError):
                found.append(kind)
            found += answered(kind)
    return found


def error_row(kind: type[errors.BatonError]) -> list[str]:
    """Return the row of one error: code, status, whether to try again, and when it is answered."""
    text = NOTES["errors"].get(kind.code) or kind.__doc__ or kind.default_message
    ends = " The connection ends." if kind.ends_connection else ""
    retry = "after `Retry-After`" if kind.retryable else ""
    return [f"`{kind.code}`", str(kind.status), f"`{kind.kind}`", retry, sentence(text) + ends]


def errors_page() -> str:
    """Return the page of all errors that clients are answered with, and of the exit codes."""
    kinds = sorted(answered(), key=lambda kind: (kind.status, kind.code))
    answers = table(("code", "status", "type", "try again", "when"), map(error_row, kinds))
    exits = [
        [str(kind.exit_code), f"`{kind.__name__}`", sentence(kind.__doc__ or NOTES["exits"][kind.__name__])]
        for kind in errors.OperatorError.__subclasses__()
    ]
    codes = table(("exit code", "error", "when"), sorted(exits))
    return page("errors", "Errors", "## Answered over HTTP", answers, "## Exit codes of the command", codes)


def metric_rows() -> list[list[str]]:
    """Return one row for each `baton_*` series: name, labels, kind, and what it counts."""
    registry = GatewayMetrics().registry
    TransferMetrics(registry, "engine")
    RemoteMetrics(registry, "engine")
    rows = []
    for collector in registry._collector_to_names:
        kind = type(collector).__name__
        name = collector._name + CODE_SUFFIX.get(kind, "")
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        if kind == "Info":
            labels = ", ".join(f"`{label}`" for label in collector._value)
        note = NOTES["metrics"].get(name, "")
        said = f"{sentence(collector._documentation)} {note}".strip()
        rows.append([f"`{name}`", labels, kind.lower(), said])
    return rows


def metrics_page() -> str:
    """Return the page of the gateway's own series."""
    return page("metrics", "Metrics", table(("series", "labels", "kind", "what it is"), metric_rows()))


class PageSettings(Settings):
    """Settings of a gateway without keys, whatever this user has."""

    @property
    def keys_file(self) -> Path:
        """Return a file that does not exist."""
        return Path(os.devnull) / "keys.json"


@cache
def gateway_document() -> tuple[Any, dict[str, Any]]:
    """Return a gateway's app with one fake engine, and its OpenAPI document."""
    app = create_app(
        PageSettings(engines=(EngineSettings(name="a", model="fake"),)), Fleet([FakeEngine("a")])
    )
    return app, app.openapi()


def routes_page() -> str:
    """Return the page of all routes, in the order in which they are tried."""
    app, document = gateway_document()
    rows = []
    for route in app.routes:
        path = getattr(route, "path", "").replace(":path", "")
        if not path or path.endswith("oauth2-redirect"):
            continue
        for method in sorted(route.methods - {"HEAD"}):
            described = document["paths"].get(path, {}).get(method.lower(), {})
            said = NOTES["routes"].get(f"{method} {path}") or described.get("description")
            said = said or (route.endpoint.__doc__ or "").split("\n\n")[0]
            statuses = ", ".join(sorted(described.get("responses", {"200": None})))
            rows.append([f"`{method} {path}`", sentence(said), statuses])
    return page("routes", "Routes", table(("route", "what it does", "statuses"), rows))


def schema_type(schema: dict[str, Any]) -> str:
    """Return the type that a JSON schema describes, in few words."""
    if "anyOf" in schema:
        return " or ".join(schema_type(each) for each in schema["anyOf"])
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        named = gateway_document()[1]["components"]["schemas"][name]
        return schema_type(named) if "enum" in named else f"`{name}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {schema_type(schema.get('items', {}))}"
    bounds = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "at least"), ("minLength", "at least"), ("maxLength", "at most"))
        if key in schema
    ]
    return " ".join([schema.get("type", "any"), *([", ".join(bounds)] if bounds else [])])


def schema_table(name: str, schema: dict[str, Any]) -> str:
    """Return the table of one object's fields."""
    rows = []
    for field, described in schema["properties"].items():
        said = (
            described.get("description")
            or NOTES["handoff"].get(f"{name}.{field}")
            or NOTES["handoff"].get(field)
        )
        default = described.get("default", "")
        shown = (
            f"`{str(default).lower() if isinstance(default, bool) else default}`"
            if default not in ("", None)
            else ""
        )
        rows.append([f"`{field}`", schema_type(described), shown, sentence(said or "")])
    return table(("field", "type", "default", "what it is"), rows)


def handoff_page() -> str:
    """Return the page of the handoff object: what is asked, what is answered."""
    schemas = gateway_document()[1]["components"]["schemas"]
    titles = NOTES["handoff_objects"]
    parts = []
    for name, title in titles.items():
        parts += [f"## {title}", schema_table(name, schemas[name])]
    source = [[f"`{field}`", sentence(said)] for field, said in NOTES["handoff_source"].items()]
    parts += ["## `handoff.source` of an answer", table(("field", "what it is"), source)]
    said = NOTES["prompt_cache_diagnostics"]["text"]
    misses = [[f"`{reason.value}`", text] for reason, text in MISSES.items()]
    parts += ["## `prompt_cache_diagnostics` of an answer", said, table(("`reason`", "meaning"), misses)]
    rows = tomllib.loads(files("baton_kv").joinpath("versions.toml").read_text(encoding="utf-8"))["same"]
    said = NOTES["kv_versions"]["text"]
    proved = [[", ".join(f"`{each}`" for each in row["versions"]), row["proof"]] for row in rows]
    parts += ["## Versions of vLLM whose KV is the same", said, table(("versions", "what proves it"), proved)]
    return page("handoff", "The handoff object", *parts)


def command_parts(name: str, found: Any) -> list[str]:
    """Return what is said of one command, and of those below it."""
    if hasattr(found, "commands"):
        return [
            part
            for key in sorted(found.commands)
            for part in command_parts(f"{name} {key}", found.commands[key])
        ]
    rows = []
    for parameter in found.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        flags = [*parameter.opts, *parameter.secondary_opts]
        shown = (
            ", ".join(f"`{flag}`" for flag in flags if flag.startswith("-"))
            or f"`{parameter.metavar or parameter.name.upper()}`"
        )
        rows.append([shown, sentence(getattr(parameter, "help", "") or "")])
    options = table(("argument or option", "what it is"), rows) if rows else ""
    return [f"## `{name}`", sentence(found.help or ""), NOTES["commands"].get(name, ""), options]


def commands_page() -> str:
    """Return the page of the `baton` command."""
    return page("commands", "Commands", *command_parts("baton", typer.main.get_command(command)))


SHORT = {"acts": "sets", "so": "as it is", "refused": "refused"}


def flags_page() -> str:
    """Return the page of vLLM's flags and of what becomes of each."""
    from baton.engines.vllm.arguments import serve_parser  # seconds of vLLM, for this page alone
    from baton.engines.vllm.flags import fate_of

    parts = []
    for group in serve_parser()._action_groups:
        rows = []
        for action in sorted(group._group_actions, key=lambda found: found.option_strings):
            fate = fate_of(action.dest)
            assert fate is not None, f"say in baton.engines.vllm.flags what becomes of {action.dest}"
            flags = [flag for flag in action.option_strings if not flag.startswith("--no-")] or ["MODEL"]
            rows.append(
                [
                    ", ".join(f"`{flag}`" for flag in flags),
                    SHORT[fate.kind],
                    sentence(fate.text[:1].upper() + fate.text[1:]),
                ]
            )
        if rows:
            title = {"options": "Of the command", "positional arguments": "The model"}.get(group.title, "")
            parts += [f"## {title or group.title}", table(("flag", "here", "setting, or why"), rows)]
    return page("vllm-flags", "vLLM's flags", *parts)


def literal(text: str) -> str:
    """Return a text as code, whatever it holds."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def family_rows(families: Iterable[Family]) -> Iterable[list[str]]:
    """Yield the row of each family: what its models are told by, and the parser."""
    for family in families:
        marks = [literal(mark) for mark in family.written]
        marks += [f"{literal(family.opens)} where the answer begins"] if family.opens else []
        marks += [f"not {literal(mark)}" for mark in family.absent]
        architectures = ", ".join(f"`{name}`..." for name in family.architectures)
        tokens = ", ".join(f"`{token}`" for token in family.tokens)
        tokens += f"{', ' if tokens else ''}and `{family.package}` is installed" if family.package else ""
        yield [family.name, ", ".join(marks), architectures, tokens, f"`{family.parser}`"]


def call_cells(family: Family) -> list[str]:
    """Return what becomes of a family's calls that are cut, and of those that a request demands."""
    parser = ToolParserManager.get_tool_parser(family.parser)
    left_out = isinstance(FORMS.get(parser), Block) or family.parser == "kimi_k3"
    cut = "left out" if left_out else "as far as it was written"
    held = "its own form"
    if parser not in TAGS and parser.structural_tag_model is None and parser.supports_required_and_named:
        held = "JSON"
    loose = "as far as it was written, but for an escape in its JSON"
    return {
        "cohere_command3": [loose, "its own form; of several tools a named one is a 400"],
        "mistral": [cut, "its own form; in `/v1/responses` a 400"],
        "gemma4": [cut, "its own form, whatever the tool's schema"],
    }.get(family.parser, [cut, held])


def parsers_page() -> str:
    """Return the page of the families whose calls and thoughts are known."""
    head = ("models", "the chat template has", "architecture", "the tokenizer has", "parser")
    thoughts = table(head, family_rows(THOUGHTS))
    of_calls = ("the call that a limit cut", "a demanded call is held to")
    rows = [[*row, *call_cells(family)] for row, family in zip(family_rows(CALLS), CALLS, strict=True)]
    calls = table((*head, *of_calls), rows)
    return page(
        "parsers",
        "Parsers",
        "## Calls: `tool_call_parser`",
        calls,
        "## Thoughts: `reasoning_parser`",
        thoughts,
    )


def where_handed_over(support: Support) -> tuple[str, str]:
    """Return what is said of a family on CPUs and on NVIDIA GPUs."""
    if support.refused:
        return (f"no: {support.refused}",) * 2
    on_gpus = "yes" if support.proved_on_gpus else "not proved: with `handoffs.unproven_devices = true`"
    return f"no: {support.refused_on_cpus}" if support.refused_on_cpus else "yes", on_gpus


def caches_page() -> str:
    """Return the page of the families of models by what their caches hold."""
    head = ("a layer's cache holds", "models", "on CPUs", "on NVIDIA GPUs", "needs", "proved by")
    rows = [
        [
            support.holds,
            support.models,
            *where_handed_over(support),
            support.needs,
            f"`{support.row}`" if support.row else "",
        ]
        for support in (family.value for family in CacheFamily)
    ]
    return page("caches", "Which models hand over", table(head, rows))


def faults_page() -> str:
    """Return the fault catalogue, each row with the tests that cover it."""
    found = fault_tests.by_row(DOCS.parent / "tests")
    parts = []
    for group in FAULTS["groups"]:
        parts.append(f"## {group['title']}")
        for row in (row for row in FAULTS["rows"] if row["row"][0] in group["letters"]):
            tests = fault_tests.shown(found.get(row["row"], []))
            figure = f"Found: {row['figure']}" if "figure" in row else ""
            parts += [f"### {row['row']}: {row['fault']}", f"Promise: {row['promise']}", figure, tests]
    return page("faults", "The fault catalogue", *parts)


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "routes.md": routes_page,
    "handoff.md": handoff_page,
    "commands.md": commands_page,
    "vllm-flags.md": flags_page,
    "parsers.md": parsers_page,
    "caches.md": caches_page,
    "faults.md": faults_page,
}


def main() -> None:
    """Write every page."""
    for name, made in PAGES.items():
        (REFERENCE / name).write_text(made())


if __name__ == "__main__":
    main()

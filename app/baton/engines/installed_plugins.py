"""List the installed vLLM plugins as vLLM finds them, without importing vLLM."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

from baton.config.environment import allowed_plugins

GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
    "vllm.endpoint_plugins",
)
ONLY_WHEN_NAMED = ("vllm.endpoint_plugins",)
"""Groups whose plugins Baton never loads: they add HTTP routes to vLLM's own server."""


@dataclass(frozen=True)
class InstalledPlugin:
    """One entry point of a vLLM plugin group.

    Attributes:
        group: entry point group, e.g. `vllm.io_processor_plugins`.
        name: name by which VLLM_PLUGINS and engines choose it.
        value: module and attribute that it points to, e.g. `baton_geo:register`.
        version: version of that distribution.
        allowed: whether vLLM loads it.
        reason: why it is not loaded; empty if it is.
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str
    allowed: bool
    reason: str
    _entry_point: EntryPoint = field(repr=False, compare=False)

    def load(self) -> Callable[[], str]:
        """Import what the entry point names. Raises whatever that import raises."""
        loaded: Callable[[], str] = self._entry_point.load()
        return loaded

    def row(self) -> dict[str, object]:
        """Return the row that `/v1/plugins` and `baton plugins --json` show."""
        return {
            "group": self.group,
            "name": self.name,
            "value": self.value,
            "distribution": self.distribution,
            "version": self.version,
            "loaded": self.allowed,
            "reason": self.reason or None,
        }


def installed_plugins() -> list[InstalledPlugin]:
    """List the plugins of all groups, sorted by group and name."""
    named = allowed_plugins()
    found = [_plugin(group, point, named) for group in GROUPS for point in entry_points(group=group)]
    return sorted(found, key=lambda plugin: (GROUPS.index(plugin.group), plugin.name))


def running_platform() -> str | None:
    """Return the module of the platform that vLLM chose in this process; None: it has not chosen one yet."""
    chosen = getattr(sys.modules.get("vllm.platforms"), "_current_platform", None)
    return None if chosen is None else type(chosen).__module__


def _plugin(group: str, point: EntryPoint, named: list[str] | None) -> InstalledPlugin:
    reason = _left_out(group, point.name, named) or _unimportable(point)
    return InstalledPlugin(
        group=group,
        name=point.name,
        value=point.value,
        distribution=point.dist.name if point.dist else "",
        version=point.dist.version if point.dist else "",
        allowed=not reason,
        reason=reason,
        _entry_point=point,
    )


def _unimportable(point: EntryPoint) -> str:
    """Explain why a plugin cannot be imported; empty if its package exists.

    Only the package is looked for: to import a plugin may take seconds, and is left to vLLM.
    """
    package = point.module.partition(".")[0]
    return "" if importlib.util.find_spec(package) else f"its package '{package}' is not installed"


def _left_out(group: str, name: str, named: list[str] | None) -> str:
    if group in ONLY_WHEN_NAMED:
        return "Baton serves its own routes; endpoint plugins belong to vLLM's own server"
    if named is not None and name not in named:
        return "VLLM_PLUGINS does not name it"
    return ""

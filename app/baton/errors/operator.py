"""Define the errors that end the command: whoever starts Baton has to fix something."""

from __future__ import annotations

from baton.errors.base import OperatorError


class SettingsError(OperatorError):
    exit_code = 2


class StartError(OperatorError):
    pass


class FleetLost(OperatorError):
    """Every engine has failed too often while the gateway ran."""

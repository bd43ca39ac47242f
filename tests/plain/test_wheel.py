"""Every row of `plain_servers.ROWS`: plain vLLM's own server, of Baton the wheel alone, started as the README says."""

from __future__ import annotations

import json

import pytest
from support.plain_servers import ROWS, PlainServer, loads
from support.stats_page import assert_counted_once, totals
from support.wheel_environment import ROOT, WheelEnvironment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
LONG = ("latent", "vision")
EACH = [pytest.param(name, marks=[pytest.mark.chaos] if name in LONG else []) for name in ROWS]
"""The connector's and the geospatial plugin's servers are started for other tests too."""


def test_of_baton_there_is_the_wheel_alone(wheel_environment: WheelEnvironment) -> None:
    """Nothing of the source tree, and every entry point under the distribution's name."""
    script = "import sys, baton, baton_kv, baton_geo, baton_stats, baton_vision; print(*sys.path, baton_kv.__file__, sep='\\n')"
    done = wheel_environment.run("-c", script)
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in [line.strip() for line in done.stdout.splitlines()]
    assert done.stdout.splitlines()[-1].startswith(str(wheel_environment.packages))
    rows = json.loads(wheel_environment.run("-m", "baton.cli", "plugins", "--json").stdout)
    ours = {row["name"] for row in rows if row["distribution"] == "vllm-baton" and row["loaded"]}
    assert {"baton_geo", "baton_stats", "baton_vision"} <= ours
    assert wheel_environment.run("-c", "import pytest").returncode != 0, "more is there than the lock names"


@pytest.mark.parametrize("plain", EACH, indirect=True)
def test_the_plugin_does_what_it_is_for(plain: PlainServer, request: pytest.FixtureRequest) -> None:
    """And vLLM found it where the wheel says it is."""
    row = ROWS[request.node.callspec.params["plain"]]
    row.ask(plain)
    for group, name in row.plugins.items():
        assert loads(plain.log, group, name), name


@pytest.mark.parametrize("plain", EACH, indirect=True)
def test_the_stat_logger_counts_unless_it_is_left_out(
    plain: PlainServer, request: pytest.FixtureRequest
) -> None:
    """Without being asked for, on the server's own page, as much as vLLM itself counts; `VLLM_PLUGINS` is honoured."""
    row = ROWS[request.node.callspec.params["plain"]]
    row.ask(plain)
    page = plain.metrics()
    if not row.stats:
        assert "baton_stats" not in page
        return
    (model,) = totals(page).keys() - {""}
    assert_counted_once(page, model)

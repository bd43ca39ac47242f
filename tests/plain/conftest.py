"""The servers, one at a time: tests that ask for the same row run one after the other, whichever module they are in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.plain_servers import ROWS, PlainServer
from support.raster_host import RasterHost
from support.wheel_environment import WheelEnvironment


@pytest.fixture(scope="package")
def plain(
    request: pytest.FixtureRequest,
    wheel_environment: WheelEnvironment,
    raster_host: RasterHost,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PlainServer]:
    """The server of a row: `@pytest.mark.parametrize("plain", ["geo"], indirect=True)`."""
    folder = tmp_path_factory.mktemp(f"plain-{request.param}")
    server = PlainServer(wheel_environment.python, ROWS[request.param], folder, raster_host)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()
    assert server.spooled() == []

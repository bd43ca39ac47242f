"""Real gateways with stores of their own, as on several machines, over one shared store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.gateways import RealGateway

CONFIG = Path(__file__).with_name("shared_engines.toml")
ELSEWHERE = """
[[engines]]
name = "there"
model = "smollm2"
url = "{url}"
handoff = true
"""
"""An engine that another gateway answers for."""


@contextmanager
def gateways_over(
    url: str, folder: Path, more: str = "", *, elsewhere: bool = False, first: dict[str, str] | None = None
) -> Iterator[list[RealGateway]]:
    """Start two gateways, one after the other, since both use the same cores.

    Args:
        url: address of the shared store.
        folder: for their stores and logs.
        more: settings at the top of their files.
        elsewhere: whether the second has an engine `there` too, which the first answers for.
        first: environment of the first alone.
    """
    secret = folder / "secret"
    secret.write_text("the secret that both of these gateways have")
    with ExitStack() as stack:
        made: list[RealGateway] = []
        for name in ("one", "two"):
            place = folder / name
            place.mkdir()
            config = place / "baton.toml"
            text = CONFIG.read_text().format(folder=place, shared=url, secret=secret)
            if elsewhere and made:
                text += ELSEWHERE.format(url=made[0].url)
            config.write_text(more + text)
            environment = None if made else first
            gateway = stack.enter_context(
                RealGateway(["--config", str(config)], place, environment, forked=True)
            )
            gateway.wait_until_ready()
            made.append(gateway)
        yield made

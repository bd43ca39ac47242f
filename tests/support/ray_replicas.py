"""Replicas of Ray Serve whose answers say which one gave them; with fake engines, and with real ones."""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.config.settings import Settings
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.engines.fleet import Fleet
from baton.engines.process.orphan_reaper import OrphanReaper
from baton.ray.application import application, arguments_of
from baton.ray.replica import GatewayReplica

TOKEN_S = 0.1
LOSE = "/lose"
"""A request for this path lets the replica's engines be lost for good."""


class NamedReplica(GatewayReplica):
    """A gateway whose answers have its node and its name in `X-Node` and `X-Replica`."""

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        app = await super().__serve_build_asgi_app__()
        name = serve.get_replica_context().replica_tag
        told = [(b"x-node", os.environ["TESTS_NODE"].encode()), (b"x-replica", name.encode())]

        async def named(scope: Scope, receive: Receive, send: Send) -> None:
            async def tell(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], *told]
                await send(message)

            if scope.get("path") == LOSE:
                self._fleet.lost.set()
            await app(scope, receive, tell)

        return named


class FakeReplica(NamedReplica):
    """A gateway with an engine that answers at once, and one that takes its time."""

    def build_fleet(self, settings: Settings, reaper: OrphanReaper) -> Fleet:
        slow = FakeBehaviour(token_seconds=TOKEN_S)
        engines = [
            FakeEngine("alpha", supports_handoffs=True),
            FakeEngine("slow", supports_handoffs=True, behaviour=slow),
        ]
        return Fleet(engines, supervision=settings.supervision)


def fake(given: dict[str, Any]) -> serve.Application:
    return application(FakeReplica, arguments_of(given))


def real(given: dict[str, Any]) -> serve.Application:
    return application(NamedReplica, arguments_of(given))

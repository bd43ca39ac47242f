"""Replicas of Ray Serve with fake engines: `serve run support.ray_fakes:app`."""

from __future__ import annotations

from ray import serve

from baton.config.settings import Settings
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.engines.fleet import Fleet
from baton.engines.process.orphan_reaper import OrphanReaper
from baton.ray.application import application
from baton.ray.arguments import Arguments
from baton.ray.replica import GatewayReplica

TOKEN_S = 0.1


class FakeReplica(GatewayReplica):
    """A replica with an engine that answers at once, and one that takes its time."""

    def build_fleet(self, settings: Settings, reaper: OrphanReaper) -> Fleet:
        slow = FakeBehaviour(token_seconds=TOKEN_S)
        engines = [
            FakeEngine("alpha", supports_handoffs=True),
            FakeEngine("slow", supports_handoffs=True, behaviour=slow),
        ]
        return Fleet(engines, supervision=settings.supervision)


def app(arguments: Arguments) -> serve.Application:
    return application(FakeReplica, arguments)

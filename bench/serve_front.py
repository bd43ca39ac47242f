"""Serve gateways with an engine that computes nothing on Ray Serve: `serve_front.py PORT REPLICAS`.

Run it in a shell that has read `deploy/ray/environment.sh`.
"""

from __future__ import annotations

import signal
import sys

import ray
from ray import serve

from baton.config.settings import Settings
from baton.engines.fake.engine import FakeEngine
from baton.engines.fleet import Fleet
from baton.engines.process.orphan_reaper import OrphanReaper
from baton.ray.application import application, arguments_of
from baton.ray.replica import GatewayReplica

STORE_BYTES = 80 << 20
"""The least that Ray takes for a store of objects, which gateways do not use."""


class BenchReplica(GatewayReplica):
    """A gateway with the engine of `fake_gateway.py`."""

    def build_fleet(self, settings: Settings, reaper: OrphanReaper) -> Fleet:
        """Return a fleet of one fake engine."""
        return Fleet([FakeEngine("bench")], supervision=settings.supervision)


def main() -> None:
    """Serve until SIGTERM."""
    port, replicas = map(int, sys.argv[1:])
    signals = {signal.SIGTERM, signal.SIGINT}
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=STORE_BYTES, log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"port": port})
    serve.run(application(BenchReplica, arguments_of({"replicas": replicas})), name="baton")
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    signal.sigwait(signals)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

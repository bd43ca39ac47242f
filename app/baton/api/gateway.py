"""What every route reaches for: the parts of one running gateway."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from baton.admission.fair_threads import FairThreads
from baton.api.admission import Admission
from baton.api.compiling import TrialCompiler
from baton.api.drain import Drain
from baton.engines.fleet import Fleet
from baton.handoffs.coordinator import Handoffs
from baton.handoffs.planner import Planner
from baton.images.reading import ImageReading
from baton.pooling.runner import Pooling
from baton.settings import Settings
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import GatewayMetrics


@dataclass(frozen=True)
class Gateway:
    """The parts of one gateway, joined in `server.create_app`."""

    settings: Settings
    fleet: Fleet
    metrics: GatewayMetrics
    handoffs: Handoffs
    planner: Planner
    pooling: Pooling
    drain: Drain
    admission: Admission
    images: ImageReading
    body_threads: FairThreads
    compiler: TrialCompiler


def gateway_of(request: Request) -> Gateway:
    """The gateway a request came to."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def context_of(request: Request) -> RequestContext:
    """Who asks, and under which ids."""
    context = request.scope["baton"]
    assert isinstance(context, RequestContext)
    return context

"""Give every route access to the services of the running gateway."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from baton.admission.fair_threads import FairThreads
from baton.admission.tenants import Admission
from baton.config.settings import Settings
from baton.engines.fleet import Fleet
from baton.handoffs.ahead import JoinsAhead
from baton.handoffs.audits.service import Audits
from baton.handoffs.automatic.service import AutomaticHandoffs
from baton.handoffs.forwarded import ForwardedHandoffs
from baton.handoffs.service import Handoffs
from baton.handoffs.sessions import Sessions
from baton.handoffs.sources import Sources
from baton.handoffs.translations.rosetta import Rosetta
from baton.handoffs.translations.service import Translations
from baton.http.middleware.drain import Drain
from baton.http.validation.trial_compile import TrialCompiler
from baton.images.reader import ImageReader
from baton.pooling.run import Pooling
from baton.responses.service import StoredResponses
from baton.telemetry.metrics import GatewayMetrics


@dataclass(frozen=True)
class Gateway:
    """The services of one gateway, created in `server.create_app`."""

    settings: Settings
    fleet: Fleet
    metrics: GatewayMetrics
    handoffs: Handoffs
    sources: Sources
    sessions: Sessions
    translations: Translations
    rosetta: Rosetta
    ahead: JoinsAhead
    automatic: AutomaticHandoffs
    audits: Audits
    forwarded: ForwardedHandoffs
    responses: StoredResponses
    pooling: Pooling
    drain: Drain
    admission: Admission
    images: ImageReader
    body_threads: FairThreads
    compiler: TrialCompiler


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that a request was sent to."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway

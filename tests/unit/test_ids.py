from __future__ import annotations

import pytest

from baton.telemetry.ids import context_from_headers

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_two_requests_never_share_an_id() -> None:
    ids = {context_from_headers([(b"x-request-id", b"same")]).request_id for _ in range(1000)}
    assert len(ids) == 1000


@pytest.mark.parametrize("sent", ["abc", "a.b-c_1", "x" * 64])
def test_a_well_formed_client_id_is_kept_beside_ours(sent: str) -> None:
    context = context_from_headers([(b"x-request-id", sent.encode())])
    assert context.client_request_id == sent
    assert context.request_id != sent


@pytest.mark.parametrize("sent", ["", "x" * 65, "a b", "a\nb", "a\x1b[31m", 'a"b', "-a", "ä"])
def test_a_malformed_client_id_is_as_if_not_sent(sent: str) -> None:
    assert context_from_headers([(b"x-request-id", sent.encode("latin-1"))]).client_request_id is None


@pytest.mark.parametrize(
    "sent",
    [
        TRACE.upper(),
        TRACE.replace("00-", "ff-", 1),
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        TRACE + "-extra",
        "garbage",
    ],
)
def test_a_malformed_traceparent_is_ignored_and_its_tracestate_with_it(sent: str) -> None:
    context = context_from_headers([(b"traceparent", sent.encode()), (b"tracestate", b"a=b")])
    assert (context.traceparent, context.tracestate) == (None, None)


def test_a_well_formed_trace_is_kept() -> None:
    context = context_from_headers([(b"tracestate", b"a=b"), (b"traceparent", TRACE.encode())])
    assert (context.traceparent, context.tracestate) == (TRACE, "a=b")

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from baton.engines.fake import FakeEngine
from baton.engines.fleet import Fleet
from baton.telemetry.metrics import MergedRegistry


def test_two_registries_with_the_same_family_give_one_family() -> None:
    registries = []
    for name in ("a", "b"):
        registry = CollectorRegistry()
        Counter("vllm:tokens", "Tokens.", ("model_name",), registry=registry).labels(name).inc(3)
        registries.append(registry)
    page = MergedRegistry(tuple(registries)).page().decode()
    assert page.count("# TYPE vllm:tokens_total") == 1
    families = {family.name: family for family in text_string_to_metric_families(page)}
    totals = [s for s in families["vllm:tokens"].samples if s.name.endswith("_total")]
    assert {s.labels["model_name"]: s.value for s in totals} == {"a": 3, "b": 3}


def test_foreign_series_stay_out() -> None:
    registry = CollectorRegistry()
    Counter("http_requests", "Of somebody else.", registry=registry)
    assert MergedRegistry((registry,)).page() == b""


def test_the_page_of_a_fleet_names_every_engine() -> None:
    fleet = Fleet([FakeEngine("a"), FakeEngine("b")])
    page = fleet.metrics_page().decode()
    assert 'baton_engine_up{engine="a"} 0.0' in page
    assert 'vllm:generation_tokens_total{engine="0",model_name="b"} 0.0' in page

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from baton.engines.fake.engine import FakeEngine
from baton.engines.fleet import Fleet
from baton.telemetry.metrics import MAX_TENANTS, MAX_UNITS, GatewayMetrics
from baton.telemetry.page import MergedRegistry


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


def test_tenants_beyond_the_limit_are_counted_together() -> None:
    metrics = GatewayMetrics()
    for number in range(MAX_TENANTS + 10):
        metrics.tenants.count(f"tenant-{number}", "2xx", prompt_tokens=2, generated_tokens=1)
    page = MergedRegistry((metrics.registry,)).page().decode()
    assert page.count("baton_tenant_requests_total{") == MAX_TENANTS + 1
    assert 'baton_tenant_requests_total{code_class="2xx",tenant="other"} 10.0' in page
    assert 'baton_tenant_tokens_total{kind="prompt",tenant="other"} 20.0' in page


@pytest.mark.parametrize(
    "amounts", [{"Pixels!": 1.0}, {"pixels": -1.0}, {"pixels": float("nan")}, {"pixels": float("inf")}]
)
def test_an_amount_that_is_none_is_refused(amounts: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="an amount is not"):
        GatewayMetrics().pooling.count_amounts("geo", amounts)


def test_a_plugin_counts_in_few_units() -> None:
    pooling = GatewayMetrics().pooling
    units = [f"unit_{letter}" for letter in "abcdefghijklm"]
    pooling.count_amounts("geo", dict.fromkeys(units[:MAX_UNITS], 1.0))
    with pytest.raises(ValueError, match="more than 8 units"):
        pooling.count_amounts("geo", {units[MAX_UNITS]: 1.0})

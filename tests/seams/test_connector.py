"""Where the connector meets vLLM: a change of its interface fails here, by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from baton.engines.arguments import engine_args
from baton.engines.launch import transfer_config
from baton.setting_groups import EngineSettings
from baton.settings import load_settings
from baton_kv import connector
from baton_kv.fingerprint import fingerprint, weights_digest
from baton_kv.messages import Outcome
from baton_kv.settings import ConnectorSettings

OVERRIDDEN = [
    name
    for name, member in vars(connector.BatonConnector).items()
    if callable(getattr(connector.BatonConnector, name)) and not name.startswith("_")
]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_every_hook_is_vllm_s_with_vllm_s_parameters(name: str) -> None:
    ours = inspect.signature(getattr(connector.BatonConnector, name))
    theirs = inspect.signature(getattr(KVConnectorBase_V1, name))
    assert list(ours.parameters) == list(theirs.parameters)


def test_every_hook_vllm_requires_is_there() -> None:
    assert connector.BatonConnector.__abstractmethods__ == frozenset()


def test_what_is_read_of_vllm_s_objects_exists() -> None:
    made = inspect.getsource(Request.__init__)
    for attribute in (
        "kv_transfer_params",
        "prompt_embeds",
        "lora_request",
        "mm_features",
        "num_computed_tokens",
        "all_token_ids",
    ):
        assert f"self.{attribute}" in made, attribute
    assert all(RequestStatus.is_finished(status) for status in connector.OWN_END)
    assert "kv_connector_worker_meta" in KVConnectorOutput.__dataclass_fields__


def config(**changes: Any) -> Any:
    plain = {"tp": 1, "pp": 1, "policy": "recompute"} | changes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=plain["tp"], pipeline_parallel_size=plain["pp"]),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=plain["policy"]),
    )


@pytest.mark.parametrize(
    ("changes", "groups", "reason"),
    [
        ({"tp": 2}, 1, "parallelism"),
        ({"pp": 2}, 1, "parallelism"),
        ({}, 2, "attend to everything"),
        ({}, 0, "attend to everything"),
        ({"policy": "fail"}, 1, "recompute"),
    ],
)
def test_what_cannot_be_exact_is_refused_at_the_start(
    changes: dict[str, Any], groups: int, reason: str
) -> None:
    full = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=full)] * groups)
    with pytest.raises(ValueError, match=reason):
        connector._refuse_what_cannot_be_exact(config(**changes), cache)
    one: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=full)])
    connector._refuse_what_cannot_be_exact(config(), one)
    window = SlidingWindowSpec(
        block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=64
    )
    promoted = FullAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=64
    )
    one.kv_cache_groups = [SimpleNamespace(kv_cache_spec=promoted)]
    with pytest.raises(ValueError, match="attend to everything"):
        connector._refuse_what_cannot_be_exact(config(), one)
    one.kv_cache_groups = [SimpleNamespace(kv_cache_spec=window)]
    with pytest.raises(ValueError, match="attend to everything"):
        connector._refuse_what_cannot_be_exact(config(), one)


def test_other_weights_under_the_same_name_have_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * 1000)
    before = weights_digest(str(tmp_path))
    weights.write_bytes(b"\0" * 999 + b"\1")
    assert weights_digest(str(tmp_path)) != before
    weights.rename(tmp_path / "model.gguf")
    single = weights_digest(str(tmp_path / "model.gguf"))
    (tmp_path / "model.gguf").write_bytes(b"\2")
    assert weights_digest(str(tmp_path / "model.gguf")) != single


def test_a_hub_id_stands_for_the_commit_in_the_cache_and_without_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="cannot be told"):
        weights_digest("org/model")
    for commit in ("a" * 40, "b" * 40):
        snapshot = tmp_path / "models--org--model" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        refs = tmp_path / "models--org--model" / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(commit)
        assert weights_digest("org/model") == f"hub:org/model@{commit}"


def test_every_fact_counts() -> None:
    facts = {"dtype": "bfloat16", "packing": "amx", "layers": ["a", "b"]}
    assert fingerprint(facts) == fingerprint(dict(reversed(facts.items())))
    for name in facts:
        assert fingerprint(facts | {name: "other"}) != fingerprint(facts)


def test_statistics_cross_a_process_as_plain_values_and_add_up() -> None:
    one = connector.TransferStats({"outcomes": [vars(Outcome("r", "k", "load", "t", None, 10, 100, 0.1))]})
    two = connector.TransferStats({"outcomes": [vars(Outcome("s", "k", "save", None, "StoreFull"))]})
    both = connector.BatonConnector.build_kv_connector_stats(one.aggregate(two).to_dict())
    assert both is not None
    assert not both.is_empty()
    assert both.reduce() == {
        "load tokens": 10,
        "load bytes": 100,
        "save tokens": 0,
        "save bytes": 0,
        "failed": 1,
    }


def test_an_engine_that_hands_over_gets_our_connector() -> None:
    settings = load_settings(handoffs={"store": "file:/somewhere"})
    engine = EngineSettings(name="a", model="m", handoff=True)
    made = engine_args(engine, "m", transfer_config(settings)).kv_transfer_config
    assert made is not None
    assert (made.kv_connector, made.kv_connector_module_path) == ("BatonConnector", "baton_kv.connector")
    assert made.kv_connector_extra_config["store"] == "file:/somewhere"
    assert set(made.kv_connector_extra_config) == set(ConnectorSettings.model_fields)
    assert engine_args(engine, "m").kv_transfer_config is None

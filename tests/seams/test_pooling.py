"""The seams of pooling into vLLM: each test fails when what it leans on moves."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from vllm import ModelRegistry, PoolingParams
from vllm.model_executor.models.interfaces import (
    is_attention_free,
    supports_multimodal,
    supports_multimodal_raw_input_only,
)
from vllm.model_executor.models.interfaces_base import get_attn_type, is_pooling_model
from vllm.multimodal.parse import ModalityDataItems
from vllm.outputs import PoolingRequestOutput
from vllm.plugins.io_processors import interface
from vllm.renderers.base import BaseRenderer
from vllm.tasks import POOLING_TASKS
from vllm.transformers_utils.config import get_config_parser

from baton.engines.installed_plugins import GROUPS
from baton.engines.vllm import plugins as engine_plugins
from baton.engines.vllm.plugins import MOVED, chosen_plugin, classic_names, make_plugin, plugin_params
from baton.errors import InvalidRequest, StartError
from baton_geo import io_processor, register
from baton_geo.model import StripItems, StripShapes
from baton_geo.prithvi import PrithviConfig
from baton_geo.raster.messages import CARRIED
from baton_geo.registration import ARCHITECTURES, MODEL_TYPE, PrithviConfigParser


def test_the_hooks_of_io_processors_are_those_the_runner_calls() -> None:
    """Names, and that an instance is made of config and renderer."""
    base = interface.IOProcessor
    assert list(inspect.signature(base.__init__).parameters)[1:] == ["vllm_config", "renderer"]
    for hook, first in {
        "parse_data": "data",
        "merge_pooling_params": "params",
        "pre_process": "prompt",
        "pre_process_async": "prompt",
        "post_process": "model_output",
        "post_process_async": "model_output",
    }.items():
        assert list(inspect.signature(getattr(base, hook)).parameters)[1] == first
    assert base.__module__.startswith("vllm.")


def test_vllm_has_the_plugin_groups_we_list() -> None:
    """A sixth group would go unlisted."""
    plugins = import_module("vllm.plugins")
    theirs = {value for name, value in vars(plugins).items() if name.endswith("_PLUGINS_GROUP")}
    assert theirs == set(GROUPS)


def test_prompts_go_in_by_the_renderer_and_params_name_the_plugin_task() -> None:
    """What `VllmEngine.encode` calls, and what vLLM's own server would send along."""
    assert list(inspect.signature(BaseRenderer.render_cmpl_async).parameters)[1] == "prompts"
    assert plugin_params(None).task == "plugin"
    given = PoolingParams(task="embed")
    assert plugin_params(given).task == "embed"
    assert plugin_params(given) is not given
    assert "plugin" in POOLING_TASKS
    assert {"finished", "outputs", "prompt_token_ids"} <= set(
        inspect.signature(PoolingRequestOutput.__init__).parameters
    )


def test_a_classic_plugin_finds_its_names_only_while_it_is_imported() -> None:
    """Each is there, is today's object, and is gone afterwards."""
    before = set(sys.modules)
    original = interface.IOProcessor
    with classic_names():
        for path, names in MOVED.items():
            module = import_module(path)
            for name, value in names.items():
                assert getattr(module, name) is value
        assert interface.IOProcessor is not original
        assert issubclass(interface.IOProcessor, original)
    assert interface.IOProcessor is original
    for path, names in MOVED.items():
        if path not in before:
            assert path not in sys.modules
        else:
            assert not any(name in vars(sys.modules[path]) for name in names)


def config(argument: str | None, file: str | None) -> Any:
    hf_config = SimpleNamespace(to_dict=lambda: {"io_processor_plugin": file})
    return SimpleNamespace(model_config=SimpleNamespace(io_processor_plugin=argument, hf_config=hf_config))


@pytest.mark.parametrize(
    ("argument", "file", "chosen"),
    [(None, None, None), ("a", None, "a"), (None, "b", "b"), ("a", "b", "a")],
)
def test_the_argument_stands_above_the_models_file(
    argument: str | None, file: str | None, chosen: str | None
) -> None:
    """As vLLM chooses."""
    assert chosen_plugin(config(argument, file)) == chosen


def test_a_missing_plugins_error_lists_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that VLLM_PLUGINS leaves out says so."""
    with pytest.raises(StartError, match=r"'nope' is not installed\. Installed are: .*baton_geo"):
        make_plugin("nope", None, None, classic=False)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(StartError, match="VLLM_PLUGINS leaves it out"):
        make_plugin("baton_geo", None, None, classic=False)


class _DescribesByTheFormerName:
    def exhibit(self, output: object) -> None: ...


def test_a_plugin_with_a_hooks_former_name_is_refused_with_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before an instance is made."""
    monkeypatch.setattr(engine_plugins, "resolve_obj_by_qualname", lambda _: _DescribesByTheFormerName)
    with pytest.raises(StartError, match=r"'baton_geo' .* defines the hook 'exhibit', .* 'describe' now"):
        make_plugin("baton_geo", None, None, classic=False)


def test_a_plugin_request_is_parsed_as_vllms() -> None:
    """With its refusals translated."""
    request = engine_plugins._request({"model": "m", "data": {"x": 1}, "priority": 3, "softmax": False})
    assert (request.data, request.priority, request.task) == ({"x": 1}, 3, "plugin")
    with pytest.raises(InvalidRequest):
        engine_plugins._request({"data": {}, "priority": "high"})


def test_registering_twice_changes_nothing() -> None:
    """vLLM calls plugins in every process, sometimes again."""
    register()
    known = set(ModelRegistry.models)
    parser = type(get_config_parser(MODEL_TYPE))
    register()
    assert set(ModelRegistry.models) == known >= set(ARCHITECTURES)
    assert type(get_config_parser(MODEL_TYPE)) is parser is PrithviConfigParser
    assert MODEL_TYPE in CONFIG_MAPPING
    assert io_processor() == io_processor() == "baton_geo.plugin.GeoProcessor"


def test_the_model_is_what_vllm_takes_for_a_multimodal_pooling_model() -> None:
    """Attention free, of raw multimodal input, and pooling."""
    from baton_geo.model import PrithviForSegmentation

    assert is_pooling_model(PrithviForSegmentation)
    assert supports_multimodal(PrithviForSegmentation)
    assert supports_multimodal_raw_input_only(PrithviForSegmentation)
    assert is_attention_free(PrithviForSegmentation)
    assert get_attn_type(PrithviForSegmentation) == "attention_free"


def shapes() -> StripShapes:
    pretrained = {
        "img_size": 32,
        "num_frames": 2,
        "patch_size": [1, 8, 8],
        "in_chans": 3,
        "embed_dim": 32,
        "depth": 1,
        "num_heads": 2,
        "mlp_ratio": 2,
        "coords_encoding": ["time", "location"],
    }
    return StripShapes(PrithviConfig.from_hf({"pretrained_cfg": pretrained}), 32)


def strip(**other: Any) -> dict[str, Any]:
    fields = {
        "tiles": torch.zeros(2, 3 * 2 * 32 * 32 * 4, dtype=torch.uint8),
        "carried": torch.tensor([CARRIED.index("float32")]),
        "scaling": torch.zeros(3 * 3 * 2),
        "temporal_coords": torch.zeros(2, 2),
        "location_coords": torch.zeros(2),
    }
    return {name: value for name, value in (fields | other).items() if value is not None}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tiles": torch.zeros(2, 24577, dtype=torch.uint8)}, r"\(2, 24576\)"),
        ({"tiles": torch.zeros(9, 24576, dtype=torch.uint8)}, r"\(8, 24576\)"),
        ({"tiles": torch.zeros(0, 24576, dtype=torch.uint8)}, r"\(1, 24576\)"),
        ({"tiles": torch.tensor(0)}, r"\(8, 24576\)"),
        ({"tiles": torch.zeros(2, 24576)}, "uint8, not float32"),
        ({"tiles": torch.full((2, 6144), torch.nan).view(torch.uint8)}, "NaN"),
        ({"tiles": [[1.0]]}, "not list"),
        ({"carried": torch.tensor([2])}, r"\(2, 12416\)"),
        ({"carried": torch.tensor([5])}, "from 0 to 4, not 5"),
        ({"carried": torch.tensor([0.0])}, "int64, not float32"),
        ({"scaling": torch.full((18,), torch.inf)}, "NaN"),
        ({"location_coords": None}, "location_coords"),
        ({"extra": torch.zeros(1)}, "extra"),
    ],
)
def test_what_would_end_the_engine_is_refused_before_it(wrong: dict[str, Any], words: str) -> None:
    """An exception in a model's forward is the death of the engine for everybody."""
    shapes().check(strip())
    with pytest.raises(ValueError, match=words):
        shapes().check(strip(**wrong))


def test_iterating_over_a_strip_ends() -> None:
    """vLLM iterates by index until IndexError."""
    items = StripItems(strip(), "image")
    assert issubclass(StripItems, ModalityDataItems)
    assert len(list(items)) == 1

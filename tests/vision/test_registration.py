"""The plugin makes its models known, cheaply, as often as it is asked to, and nothing else happens."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.engine

SCRIPT = """
import json, sys
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points

(entry,) = entry_points(group="vllm.general_plugins", name="baton_vision")
register = entry.load()
told = {"heavy": [name for name in ("vllm", "torch", "transformers") if name in sys.modules]}

from vllm import ModelRegistry
from baton_vision import registration

def models():
    return {name: getattr(model, "module_name", "") for name, model in ModelRegistry.models.items()}

def ours():
    return sorted(name for name, module in models().items() if module.startswith("baton_vision."))

before, really = models(), registration.find_spec
registration.find_spec = lambda name: ModuleSpec(name, None)
register()
told["with torchvision"] = ours()
registration.find_spec = really
register()
told["without"] = ours()
once = dict(ModelRegistry.models)
register()
told["again"] = [name for name, model in ModelRegistry.models.items() if once.get(name) is not model]
told["others"] = [name for name in before if name not in ours() and before[name] != models()[name]]
told["imported"] = [name for name in sys.modules if name in ("baton_vision.llava", "baton_vision.fuyu")]
try:
    import vllm.model_executor.models.llava
    told["vllm's own"] = "imports"
except ImportError as error:
    told["vllm's own"] = str(error)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> Any:
    """Return what a process of its own saw: where torchvision is, where it is not, and at a second call."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_entry_point_imports_nothing_heavy(told: Any) -> None:
    """vLLM looks at it in every process, whatever that serves."""
    assert told["heavy"] == []


def test_official_names_lead_to_ours_where_vllm_has_nothing_that_runs(told: Any) -> None:
    """Its own LLaVA stays where it can run, which is where torchvision is; Fuyu it has none."""
    mine = ["BatonFuyuForCausalLM", "BatonLlavaForConditionalGeneration", "FuyuForCausalLM"]
    assert told["with torchvision"] == mine
    assert told["without"] == [*mine, "LlavaForConditionalGeneration"]


def test_registering_again_changes_nothing(told: Any) -> None:
    """Nor does registering at all change another model, or import one of ours."""
    assert (told["again"], told["others"], told["imported"]) == ([], [], [])


def test_vllm_s_own_llava_does_not_run_here(told: Any) -> None:
    """The reason for all this; the day it runs, the official name should be vLLM's again."""
    assert told["vllm's own"] == "No module named 'torchvision'"

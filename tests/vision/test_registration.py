"""The plugin makes its models known, cheaply, as often as it is asked to, and nothing else happens."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

TWICE = """
import sys
from importlib.metadata import entry_points
import time

started = time.perf_counter()
(entry,) = entry_points(group="vllm.general_plugins", name="baton_vision")
register = entry.load()
assert not {"vllm", "torch", "transformers"} & set(sys.modules)

from vllm import ModelRegistry
before = dict(ModelRegistry.models)
register()
once = dict(ModelRegistry.models)
register()
assert all(ModelRegistry.models[name] is model for name, model in once.items())
changed = {name for name, model in once.items() if before.get(name) is not model}
print(*sorted(changed))
assert not {"baton_vision.llava_model", "baton_vision.fuyu_model", "torchvision", "PIL"} & set(sys.modules)
"""


def test_registering_twice_is_registering_once() -> None:
    """In a process of its own: nothing heavy before vLLM, none of the models' code after; four names, no others."""
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "BatonFuyuForCausalLM",
        "BatonLlavaForConditionalGeneration",
        "FuyuForCausalLM",
        "LlavaForConditionalGeneration",
    ]


WITH_TORCHVISION = """
import importlib.util, importlib.machinery
found = importlib.util.find_spec
def find_spec(name, package=None):
    return importlib.machinery.ModuleSpec(name, None) if name == "torchvision" else found(name, package)

from vllm import ModelRegistry
from baton_vision import registration
registration.find_spec = find_spec
registration.register_models()
registration.register_models()
print(ModelRegistry.models["LlavaForConditionalGeneration"].module_name)
print(ModelRegistry.models["FuyuForCausalLM"].module_name)
"""


def test_vllm_s_own_llava_stays_where_it_can_run() -> None:
    """That is where torchvision is; Fuyu is ours everywhere, for vLLM has none."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_TORCHVISION], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["vllm.model_executor.models.llava", "baton_vision.fuyu_model"]


def test_vllm_s_own_llava_does_not_run_here() -> None:
    """The reason for all this; the day it runs, the official name should be vLLM's again."""
    done = subprocess.run(
        [sys.executable, "-c", "import vllm.model_executor.models.llava"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "No module named 'torchvision'" in done.stderr

"""The Python example of the latent plugin's README, with plain vLLM and the wheel alone: AVP's quick start, translated."""

from __future__ import annotations

import re

import pytest
from support.plain_servers import QUIET, smollm2
from support.wheel_environment import ROOT, WheelEnvironment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.chaos]
README = (ROOT / "plugins" / "baton_latent" / "README.md").read_text()


def test_the_readme_s_offline_example(wheel_environment: WheelEnvironment) -> None:
    """As it stands, with a model that is here; its engine thought as often as it was asked to."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "LLM(" in block]
    code = code.replace("/models/Qwen2.5-7B-Instruct", smollm2(ROOT)).replace(
        "max_tokens=256", "max_tokens=8"
    )
    code = code.replace("LLM(model,", "LLM(model, kv_cache_memory_bytes=2**27, max_model_len=512,")
    script = wheel_environment.folder / "quick_start.py"
    script.write_text(f'if __name__ == "__main__":\n{re.sub("(?m)^", "    ", code)}\n')
    done = wheel_environment.run(str(script), **QUIET, VLLM_LOGGING_LEVEL="DEBUG")
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout + done.stderr
    assert "baton_latent registered:" in told
    assert "latent steps: BatonLatentLlamaForCausalLM, placeholder token" in told
    assert "latent steps: 20 of 1 requests in " in told

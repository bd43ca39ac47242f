"""What others may know of the vision models: their names. Pure: the standard library only."""

from __future__ import annotations

ARCHITECTURES = {
    "LlavaForConditionalGeneration": "BatonLlavaForConditionalGeneration",
    "FuyuForCausalLM": "BatonFuyuForCausalLM",
}
"""By the name in an official checkpoint's config.json: our class for it."""

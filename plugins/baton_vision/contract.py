"""What others may know of the vision models: their names, and a refusal. Pure: the standard library only."""

from __future__ import annotations

ARCHITECTURES = {
    "LlavaForConditionalGeneration": "BatonLlavaForConditionalGeneration",
    "FuyuForCausalLM": "BatonFuyuForCausalLM",
}
"""By the name in an official checkpoint's config.json: our class for it."""
MISCOUNTED = "image tokens in the prompt"
"""What a refusal says when there are not as many of them as images."""

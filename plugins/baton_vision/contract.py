"""Names that the gateway shares with the vision models. Pure: imports only the standard library."""

from __future__ import annotations

ARCHITECTURES = {
    "LlavaForConditionalGeneration": "BatonLlavaForConditionalGeneration",
    "FuyuForCausalLM": "BatonFuyuForCausalLM",
}
"""Our class for each architecture named in an official checkpoint's config.json."""
MISCOUNTED = "image tokens in the prompt"
"""Text by which the gateway recognises the refusal of a prompt with a wrong number of image tokens."""

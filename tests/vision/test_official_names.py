"""The tiny models that stand for published checkpoints have the parameter names of those."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import FuyuForCausalLM, LlavaForConditionalGeneration
from vision.tiny_vision import make_fuyu, make_llava, official_name

LLAMA_LAYER = {
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
}
CLIP_LAYER = {
    f"{name}.{kind}"
    for name in (
        *("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2"),
        *(f"self_attn.{part}_proj" for part in ("k", "out", "q", "v")),
    )
    for kind in ("bias", "weight")
}
LLAVA = {
    "language_model.lm_head.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.model.norm.weight",
    "multi_modal_projector.linear_1.bias",
    "multi_modal_projector.linear_1.weight",
    "multi_modal_projector.linear_2.bias",
    "multi_modal_projector.linear_2.weight",
    "vision_tower.vision_model.embeddings.class_embedding",
    "vision_tower.vision_model.embeddings.patch_embedding.weight",
    "vision_tower.vision_model.embeddings.position_embedding.weight",
    "vision_tower.vision_model.post_layernorm.bias",
    "vision_tower.vision_model.post_layernorm.weight",
    "vision_tower.vision_model.pre_layrnorm.bias",
    "vision_tower.vision_model.pre_layrnorm.weight",
    *(f"language_model.model.layers.N.{name}" for name in LLAMA_LAYER),
    *(f"vision_tower.vision_model.encoder.layers.N.{name}" for name in CLIP_LAYER),
}
"""Of llava-hf/llava-1.5-7b-hf, as its index of weights lists them; N is a layer's number."""
PERSIMMON_LAYER = (
    *("input_layernorm", "post_attention_layernorm", "mlp.dense_4h_to_h", "mlp.dense_h_to_4h"),
    *(f"self_attn.{name}" for name in ("dense", "k_layernorm", "q_layernorm", "query_key_value")),
)
FUYU = {
    "language_model.lm_head.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.model.final_layernorm.bias",
    "language_model.model.final_layernorm.weight",
    "vision_embed_tokens.bias",
    "vision_embed_tokens.weight",
    *(
        f"language_model.model.layers.N.{name}.{kind}"
        for name in PERSIMMON_LAYER
        for kind in ("bias", "weight")
    ),
}
"""Of adept/fuyu-8b, likewise."""


@pytest.mark.parametrize(
    ("make", "kind", "published"),
    [(make_llava, LlavaForConditionalGeneration, LLAVA), (make_fuyu, FuyuForCausalLM, FUYU)],
)
def test_the_names_are_the_published_ones(
    tmp_path: Path, make: object, kind: object, published: set[str]
) -> None:
    """What is loaded in the parity tests from the layout `official` is then loaded from those too."""
    make(tmp_path)  # type: ignore[operator]  # one of the two
    names = kind.from_pretrained(tmp_path).state_dict()  # type: ignore[attr-defined]  # likewise
    ours = {re.sub(r"\.\d+\.", ".N.", official_name(name)) for name in names}
    assert ours == published

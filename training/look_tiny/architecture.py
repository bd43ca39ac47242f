"""The configurations of `look-tiny`'s model and processor, as transformers writes them.

The layout is that of the `llava-hf` checkpoints (https://huggingface.co/llava-hf).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

SIDE: Final = 96  # pixels, height and width of the tower's input
PATCH: Final = 16  # pixels
IMAGE_TOKENS: Final = (SIDE // PATCH) ** 2
WIDTH: Final = 256
TEXT_WIDTH: Final = 576  # of SmolLM2-135M
IMAGE_TOKEN: Final = "<image>"  # the placeholder's text
# SmolLM2's `<repo_name>`: a special token its chats have no use for, so the embedding needs no new row.
IMAGE_TOKEN_ID: Final = 3
VISION: Final[dict[str, Any]] = {
    "model_type": "siglip_vision_model",
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
    "num_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "vision_use_head": False,
}
PROJECTOR: Final[dict[str, Any]] = {
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",  # SigLIP has no class token to leave out
}
PREPROCESSOR: Final[dict[str, Any]] = {
    "image_processor_type": "SiglipImageProcessor",
    "processor_class": "LlavaProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"height": SIDE, "width": SIDE},
    "resample": 3,  # bicubic
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSOR: Final[dict[str, Any]] = {
    "processor_class": "LlavaProcessor",
    "patch_size": PATCH,
    "vision_feature_select_strategy": PROJECTOR["vision_feature_select_strategy"],
    "num_additional_image_tokens": 0,
    "image_token": IMAGE_TOKEN,
}
# SmolLM2's, with images at their place among a message's parts and without SmolLM2's default system
# message: the prompt grows only at its end, and stays short.
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def config_json() -> dict[str, Any]:
    """Return the contents of config.json without `text_config`, which is taken from the prepared SmolLM2."""
    return {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": IMAGE_TOKEN_ID,
        "image_seq_length": IMAGE_TOKENS,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **PROJECTOR,
        "vision_config": VISION,
    }


def write_descriptions(folder: Path) -> None:
    """Write the configuration files and the chat template of the model's folder."""
    files = {
        "config.json": config_json(),
        "preprocessor_config.json": PREPROCESSOR,
        "processor_config.json": PROCESSOR,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)

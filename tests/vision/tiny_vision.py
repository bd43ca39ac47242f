"""Tiny random vision models with tokenizers and image processors of their own, as checkpoints are published.

Weights are spread wide enough for an image to change what is said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessorPil,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    FuyuConfig,
    FuyuForCausalLM,
    FuyuImageProcessorPil,
    FuyuProcessor,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    OPTConfig,
    PersimmonConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

TEXT = "a red square left of two blue circles on a green field with water, roads and clouds: what is where? "
PATCH, SIDE = 10, 30
"""Of LLaVA's towers, pixels: nine patches."""
FUYU_PATCH, FUYU_WIDTH, FUYU_HEIGHT = 6, 48, 30
"""Eight columns and five rows at most."""
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise: no two are alike."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def llava_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few merges, a beginning of its own before every text, and `<image>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
        chat_template=CHAT,
    )


def fuyu_tokenizer() -> PreTrainedTokenizerFast:
    """As Fuyu's: every text begins with an underscore, even before the image's tokens, which are of the vocabulary."""
    own = ["<unk>", "<s>", "|ENDOFTEXT|", "|SPEAKER|", "|NEWLINE|", "<0x04>"]
    words = sorted({f"▁{word}" for word in TEXT.split()})
    letters = ["▁", *(chr(code) for code in range(33, 127))]
    pieces = [*((piece, 0.0) for piece in own), *((word, -4.0) for word in words)]
    pieces += [(letter, -6.0) for letter in letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    end = ("|ENDOFTEXT|", own.index("|ENDOFTEXT|"))
    tokenizer.post_processor = processors.TemplateProcessing(single="|ENDOFTEXT| $A", special_tokens=[end])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="|ENDOFTEXT|", eos_token="|ENDOFTEXT|", unk_token="<unk>"
    )


def tower_config(kind: str) -> CLIPVisionConfig | SiglipVisionConfig:
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "initializer_range": 0.3,
        "initializer_factor": 8.0,
    }
    if kind == "clip":
        return CLIPVisionConfig(**shape)
    del shape["initializer_range"], shape["initializer_factor"]
    return SiglipVisionConfig(**shape)


def make_llava(
    folder: Path, *, tower: str = "clip", layout: str = "saved", spare: int = 60, **options: Any
) -> Path:
    """`options` are LlavaConfig's; `spare` are rows of the embedding that no token has, below 0 too few.

    `layout` is how the weights are named: `saved` by transformers 5, `official` or `prefixed`.
    """
    tokenizer = llava_tokenizer()
    text = LlamaConfig(
        vocab_size=len(tokenizer) + spare,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlavaConfig(
        vision_config=tower_config(tower),
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        **options,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    write(model, folder, layout)
    images = {"clip": clip_images, "siglip": siglip_images}[tower]()
    LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=int(tower == "clip"),
        chat_template=CHAT,
    ).save_pretrained(folder)
    return folder


def clip_images() -> CLIPImageProcessorPil:
    return CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})


def siglip_images() -> SiglipImageProcessorPil:
    return SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})


def make_fuyu(folder: Path, *, layout: str = "saved", spare: int = 6) -> Path:
    """With so many rows of the embedding beyond the vocabulary."""
    tokenizer = fuyu_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer) + spare,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.convert_tokens_to_ids("<s>"),
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = FuyuConfig(
        **shape,
        text_config=PersimmonConfig(**shape).to_dict(),
        patch_size=FUYU_PATCH,
        image_token_id=tokenizer.convert_tokens_to_ids("|SPEAKER|"),
    )
    torch.manual_seed(1)
    write(FuyuForCausalLM(config), folder, layout)
    images = FuyuImageProcessorPil(
        size={"height": FUYU_HEIGHT, "width": FUYU_WIDTH},
        patch_size={"height": FUYU_PATCH, "width": FUYU_PATCH},
    )
    FuyuProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def make_blip2(folder: Path, *, spare: int = 60) -> Path:
    """vLLM's own model whose image tokens are inserted: four before each prompt."""
    tokenizer = llava_tokenizer()
    shape = {"num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
    shape |= {"initializer_range": 0.3}  # its own for the tower, 1e-10, makes all images the same
    config = Blip2Config(
        vision_config=Blip2VisionConfig(hidden_size=32, image_size=SIDE, patch_size=PATCH, **shape).to_dict(),
        qformer_config=Blip2QFormerConfig(
            hidden_size=32, encoder_hidden_size=32, vocab_size=9, cross_attention_frequency=1, **shape
        ).to_dict(),
        text_config=OPTConfig(
            vocab_size=len(tokenizer) + spare,
            hidden_size=64,
            word_embed_proj_dim=64,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=1024,
            init_std=0.2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        ).to_dict(),
        num_query_tokens=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    write(Blip2ForConditionalGeneration(config), folder, "saved")
    images = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    Blip2Processor(image_processor=images, tokenizer=tokenizer, num_query_tokens=4).save_pretrained(folder)
    return folder


def write(model: PreTrainedModel, folder: Path, layout: str) -> None:
    """Write configuration and weights, with every bias and norm moved from where it starts."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    if layout == "saved":
        model.save_pretrained(folder)
        return
    rename = {"official": official_name, "prefixed": prefixed_name}[layout]
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    weights = {rename(name): weight.clone() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def prefixed_name(name: str) -> str:
    """As transformers 4.52 and later write it."""
    return name.replace("model.vision_tower.", "model.vision_tower.vision_model.")


def official_name(name: str) -> str:
    """As in checkpoints up to transformers 4.51, which is what the official ones are."""
    name = prefixed_name(name).replace("lm_head.", "language_model.lm_head.")
    return name.replace("model.language_model.", "language_model.model.").removeprefix("model.")

"""Tiny random models of other families: `tiny_models.py SOURCE FOLDER [SPREAD [LAYERS]]`, with the source's tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path

FAMILIES = ("qwen2", "mistral", "gemma", "llama", "llama-4-heads", "gemma3", "windows", "gpt-oss")
STATES = ("granite4", "qwen3-next", "gemma4")
DRAFT = "llama-4-heads-draft"


if __name__ == "__main__":
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Gemma3TextConfig,
        Gemma4TextConfig,
        GemmaConfig,
        GptOssConfig,
        GraniteMoeHybridConfig,
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3NextConfig,
    )

    source, folder, spread, layers = (*sys.argv[1:], None, None)[:4]
    shape = {
        "vocab_size": 49152,
        "num_hidden_layers": int(layers or 2),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": float(spread or 0.3),  # large enough for what was said to matter
    }
    configs = {
        "qwen2": Qwen2Config(**shape, tie_word_embeddings=True),
        "mistral": MistralConfig(**shape, sliding_window=None, tie_word_embeddings=False),
        "gemma": GemmaConfig(**shape, tie_word_embeddings=True),
        "llama": LlamaConfig(**shape, tie_word_embeddings=False),
        "gemma3": Gemma3TextConfig(  # windows of 64 tokens, and one layer that sees everything
            **shape | {"num_hidden_layers": 3},
            tie_word_embeddings=False,  # or a random one repeats the last token for ever
            sliding_window=64,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        "windows": MistralConfig(**shape, sliding_window=64, tie_word_embeddings=False),
        "gpt-oss": GptOssConfig(  # windows, attention sinks and experts
            **shape | {"num_hidden_layers": 2, "head_dim": 64, "intermediate_size": 64},
            tie_word_embeddings=False,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        "llama-4-heads": LlamaConfig(
            **shape | {"num_attention_heads": 4, "num_key_value_heads": 4}, tie_word_embeddings=False
        ),
    }
    plain = {name: value for name, value in shape.items() if name != "head_dim"}
    four = {"num_hidden_layers": 4, "tie_word_embeddings": False}
    configs |= {
        "granite4": GraniteMoeHybridConfig(  # Mamba 2, attention and experts
            **plain | four,
            layer_types=["mamba", "mamba", "attention", "mamba"],
            position_embedding_type="rope",
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_chunk_size=32,
        ),
        "qwen3-next": Qwen3NextConfig(  # gated delta nets, attention and experts
            **shape | four | {"num_key_value_heads": 2, "head_dim": 128},
            layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=1,
            linear_num_value_heads=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        ),
        "gemma4": Gemma4TextConfig(  # one head size and number of KV heads in layers with windows, another beside
            **shape | four | {"num_attention_heads": 4, "num_key_value_heads": 2},
            sliding_window=64,
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            global_head_dim=64,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=49152,
        ),
    }
    configs[DRAFT] = configs["llama-4-heads"]
    for number, family in enumerate((*FAMILIES, DRAFT, *(() if layers else STATES))):
        torch.manual_seed(FAMILIES.index("llama-4-heads") if family == DRAFT else number)
        model = AutoModelForCausalLM.from_config(configs[family], dtype=torch.float32)
        if family == DRAFT:  # agrees with the model often, and not always
            with torch.no_grad():
                for weights in model.parameters():
                    weights += 0.003 * torch.randn_like(weights)
        model.save_pretrained(Path(folder) / family)
        AutoTokenizer.from_pretrained(source).save_pretrained(Path(folder) / family)

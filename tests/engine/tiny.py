"""Tiny random models for tests that need a real engine but no real answers: `tiny.py SOURCE FOLDER`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source, folder = sys.argv[1:]
    config = AutoConfig.from_pretrained(source)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 2, 64, 128
    config.num_attention_heads = config.num_key_value_heads = 2
    config.head_dim = 32
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)

"""Which token stands for a step, and how a prompt asks for steps: plain files, no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.config.settings import load_settings
from baton.models.store import ModelStore
from baton_latent import choose_placeholder, latent_overrides, prepare_latent_prompt
from baton_latent.contract import PLACEHOLDER_KEY, NoPlaceholder


def model(
    folder: Path, tokens: dict[str, int], *, words: int = 10, vocabulary: int = 10, **config: Any
) -> Path:
    added = [{"id": token, "content": text, "special": True} for text, token in tokens.items()]
    vocab = {f"word{number}": number for number in range(words)}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocab}}))
    settings = {"architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "eos_token_id": 2} | config
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_steps_follow_the_prompt() -> None:
    assert prepare_latent_prompt([1, 2], 3, 9) == [1, 2, 9, 9, 9]
    assert prepare_latent_prompt([1, 2], 0, 9) == [1, 2]
    assert prepare_latent_prompt([], 0, 9) == []
    for tokens, steps in (([], 1), ([1], -1)):
        with pytest.raises(ValueError, match="latent steps"):
            prepare_latent_prompt(tokens, steps, 9)


def test_a_token_kept_in_reserve_comes_first(tmp_path: Path) -> None:
    tokens = {"<s>": 1, "</s>": 2, "<|reserved_special_token_7|>": 5, "<unused3>": 6, "<tool>": 7}
    assert choose_placeholder(model(tmp_path, tokens, vocabulary=20)) == 6


def test_then_a_row_that_no_token_has(tmp_path: Path) -> None:
    assert choose_placeholder(model(tmp_path, {"</s>": 2, "<tool>": 7}, vocabulary=20)) == 19


def test_then_a_special_token_without_a_part(tmp_path: Path) -> None:
    tokens = {"</s>": 2, "<a>": 3, "<b>": 4, "<c>": 5, "<d>": 6, "<e>": 7}
    folder = model(tmp_path, tokens, pad_token_id=7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 6]}))
    (folder / "chat_template.jinja").write_text("{{ '<c>' }}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "<b>"}))
    assert choose_placeholder(folder) == 3


def test_without_one_it_is_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(NoPlaceholder, match=PLACEHOLDER_KEY):
        choose_placeholder(model(tmp_path, {"</s>": 2}))
    assert latent_overrides(tmp_path, 8)[PLACEHOLDER_KEY] == 8


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        latent_overrides(model(tmp_path, {}, architectures=["GPT2LMHeadModel"]), 8)
    with pytest.raises(ValueError, match="folder"):
        latent_overrides("some/hub-model")


def test_smollm2_has_one() -> None:
    folder = ModelStore(load_settings().models_folder).resolve("smollm2")
    assert latent_overrides(folder) == {
        "architectures": ["BatonLatentLlamaForCausalLM"],
        PLACEHOLDER_KEY: 16,  # <empty_output>
    }


def test_the_contract_needs_no_torch() -> None:
    code = "import sys, baton_latent; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=path)
    assert asked.stdout.strip() == "set()"
